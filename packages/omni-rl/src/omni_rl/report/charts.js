"use strict";

// Elements. Data from files is only inserted as text or as the value of an attribute, never parsed as HTML.

function element(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function el(tag, attributes = {}, ...children) {
  return element(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return element(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// Numbers.

function show(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  if (size >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

// Format numbers with the same number of decimals.
function alike(values) {
  const texts = values.map(show);
  const places = Math.max(...texts.map((text) => (text.split(".")[1] || "").length));
  if (places > 3 || values.some((value) => typeof value !== "number") || texts.some((text) => text.includes("e"))) return texts;
  return values.map((value) => value.toFixed(places));
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

// Return at least two ticks, if possible.
function fewTicks(low, high, count) {
  for (let n = count; n < count + 6; n++) if (ticks(low, high, n).length > 1) return ticks(low, high, n);
  return ticks(low, high, count);
}

function nearest(sorted, wanted) {
  let best = 0;
  for (let i = 1; i < sorted.length; i++) if (Math.abs(sorted[i] - wanted) <= Math.abs(sorted[best] - wanted)) best = i;
  return best;
}

// Moving mean over the values at most `reach` steps away.
function movingMean(steps, values, reach) {
  let [first, after, sum] = [0, 0, 0];
  return steps.map((step) => {
    while (after < steps.length && steps[after] <= step + reach) sum += values[after++];
    while (steps[first] < step - reach) sum -= values[first++];
    return sum / (after - first);
  });
}

// One cursor for all charts: pointing at a step in one chart shows its values in all of them.

const cursor = { step: null, readers: [] };

function moveCursor(step) {
  if (step === cursor.step) return;
  cursor.step = step;
  for (const read of cursor.readers) read(step);
}

const LONG = 40; // points; longer lines of noisy metrics get a moving mean
const MARGIN = { left: 46, right: 12, top: 10, bottom: 24 };

// A chart: {title, note, tall, low, high, lines} with lines {label, color, x, y, low?, high?, smooth, dots}, or bars
// {from, to, seconds: {name: [...]}} in place of lines; low and high are the first and the last step shown.
function chartFigure(chart) {
  if (chart.lines && chart.lines.every(isSteady)) return steadyFigure(chart);
  const plot = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${chart.title}, by step` });
  const when = el("span", { class: "when" });
  const rows = (chart.lines || chart.bars).map((line) => ({ line, value: el("span", { class: "value" }) }));
  const legend = rows.map(({ line, value }) =>
    el("li", { class: line.color, title: line.name }, el("i", { "aria-hidden": "true" }), el("span", { class: "label" }, line.label), value));
  const figure = el("figure", { class: chart.tall ? "chart tall" : "chart" },
    el("figcaption", {}, el("h3", { title: metrics(chart) }, chart.title), when), plot, el("ul", { class: "legend" }, legend),
    chart.note ? el("p", { class: "note" }, chart.note) : null);
  const steps = chart.bars ? chart.middles : [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  plot.setAttribute("aria-valuemin", steps[0]);
  plot.setAttribute("aria-valuemax", steps[steps.length - 1]);
  let drawn = null;

  function read(step) {
    const at = steps[step === null ? steps.length - 1 : nearest(steps, step)];
    const places = rows.map(({ line }) => nearest(line.x, at));
    const numbers = alike(rows.map(({ line }, k) => line.y[places[k]]));
    const texts = rows.map(({ line, value }, k) => {
      const step = line.x[places[k]];
      const error = line.error ? ` \u00b1 ${show(line.error[places[k]])}` : "";
      value.textContent = numbers[k] + error + (chart.bars || step === at ? "" : ` at ${show(step)}`);
      return `${line.label} ${value.textContent}`;
    });
    when.textContent = `step ${chart.bars ? stretch(chart, nearest(steps, at)) : show(at)}`;
    plot.setAttribute("aria-valuenow", at);
    plot.setAttribute("aria-valuetext", `step ${show(at)}: ${texts.join(", ")}`);
    if (drawn) drawn.mark(step === null ? null : at);
  }

  function draw() {
    const width = plot.clientWidth;
    if (!width) return;
    drawn = chart.bars ? drawBars(chart, width, plot.clientHeight) : drawLines(chart, width, plot.clientHeight);
    plot.replaceChildren(drawn.picture);
    read(cursor.step);
  }

  plot.addEventListener("pointermove", (event) => moveCursor(pointed(event)));
  plot.addEventListener("pointerdown", (event) => moveCursor(pointed(event)));
  plot.addEventListener("pointerleave", () => moveCursor(null));
  plot.addEventListener("blur", () => moveCursor(null));
  plot.addEventListener("keydown", (event) => {
    const here = cursor.step === null ? steps.length - 1 : nearest(steps, cursor.step);
    const last = steps.length - 1;
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, ArrowDown: here - 1, ArrowUp: here + 1, PageDown: here - 10,
      PageUp: here + 10, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    moveCursor(steps[Math.max(0, Math.min(last, to))]);
  });

  function pointed(event) {
    const share = (event.clientX - plot.getBoundingClientRect().left - MARGIN.left) / (plot.clientWidth - MARGIN.left - MARGIN.right);
    return steps[nearest(steps, chart.low + Math.max(0, Math.min(1, share)) * (chart.high - chart.low))];
  }

  read(cursor.step);
  cursor.readers.push(read);
  new ResizeObserver(draw).observe(plot);
  return figure;
}

// Names of a chart's metrics, as in metrics.jsonl and docs/metrics.md.
function metrics(chart) {
  return [...new Set((chart.lines || chart.bars).map((line) => line.name).filter(Boolean))].join(", ");
}

// A constant line needs no chart.
function isSteady(line) {
  return line.x.length > 1 && [...line.y, ...(line.low || []), ...(line.high || [])].every((value) => value === line.y[0]);
}

function steadyFigure(chart) {
  const rows = chart.lines.map((line) => el("li", { class: line.color, title: line.name }, el("i", { "aria-hidden": "true" }),
    el("span", { class: "label" }, line.label), el("span", { class: "value" }, show(line.y[0]))));
  return el("figure", { class: "chart steady" },
    el("figcaption", {}, el("h3", { title: metrics(chart) }, chart.title), el("span", { class: "when" }, "the same at every step")),
    el("ul", { class: "legend" }, rows), chart.note ? el("p", { class: "note" }, chart.note) : null);
}

function stretch(chart, i) {
  return chart.from[i] === chart.to[i] ? show(chart.from[i]) : `${show(chart.from[i])} to ${show(chart.to[i])}, mean`;
}

// The common frame of lines and bars: axes, and functions that map steps and values to pixels.
function frame(chart, width, height, bottom, top) {
  const right = width - MARGIN.right;
  const floor = height - MARGIN.bottom;
  const span = chart.high - chart.low || 1;
  const px = (step) => MARGIN.left + ((step - chart.low) / span) * (right - MARGIN.left);
  const py = (value) => floor - ((value - bottom) / (top - bottom || 1)) * (floor - MARGIN.top);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
  const values = fewTicks(bottom, top, chart.tall ? 5 : 3);
  const texts = alike(values);
  for (const [i, value] of values.entries()) {
    const y = Math.round(py(value)) + 0.5;
    picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }));
    picture.append(svg("text", { class: "axis", x: MARGIN.left - 8, y: y + 3.5, "text-anchor": "end" }, texts[i]));
  }
  const steps = ticks(chart.low, chart.high, Math.max(2, Math.floor(width / 75))).filter(Number.isInteger);
  for (const step of steps) {
    const anchor = px(step) > right - 12 ? "end" : "middle";
    picture.append(svg("text", { class: "axis", x: px(step), y: height - 6, "text-anchor": anchor }, show(step)));
  }
  return { picture, px, py, floor };
}

function drawLines(chart, width, height) {
  const values = chart.lines.flatMap((line) => [...line.y, ...(line.low || []), ...(line.high || [])]);
  let bottom = Math.min(...values);
  let top = Math.max(...values);
  const room = top - bottom || Math.abs(top) || 1;
  bottom = bottom >= 0 && bottom < 0.6 * room ? 0 : bottom - 0.06 * room;
  top += 0.06 * room;
  const { picture, px, py, floor } = frame(chart, width, height, bottom, top);
  const path = (xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(ys[i]).toFixed(1)}`).join("");
  const long = chart.lines.some((line) => line.x.length > LONG);
  for (const line of [...chart.lines].reverse()) {
    const group = svg("g", { class: line.color });
    if (line.low) {
      const back = [...line.x].reverse();
      const band = path(line.x, line.high) + path(back, [...line.low].reverse()).replace("M", "L") + "Z";
      group.append(svg("path", { class: "band", d: band }));
    }
    const smooth = line.smooth && long && line.x.length > 8;
    group.append(svg("path", { class: smooth ? "line faint" : "line", d: path(line.x, line.y) }));
    if (smooth) group.append(svg("path", { class: "line", d: path(line.x, movingMean(line.x, line.y, (chart.high - chart.low) / LONG)) }));
    if (line.x.length <= 24) for (const [i, x] of line.x.entries()) group.append(svg("circle", { class: "dot", cx: px(x), cy: py(line.y[i]), r: 3 }));
    picture.append(group);
  }
  const marks = svg("g", {});
  picture.append(marks);
  function mark(step) {
    marks.replaceChildren();
    if (step === null) return;
    marks.append(svg("line", { class: "cross", x1: px(step), x2: px(step), y1: MARGIN.top, y2: floor }));
    for (const line of chart.lines) {
      const i = nearest(line.x, step);
      marks.append(svg("circle", { class: `mark ${line.color}`, cx: px(line.x[i]), cy: py(line.y[i]), r: 4 }));
    }
  }
  return { picture, mark };
}

function drawBars(chart, width, height) {
  const count = chart.middles.length;
  const sums = chart.middles.map((_, i) => chart.bars.reduce((sum, bar) => sum + bar.y[i], 0));
  const { picture, px, py, floor } = frame(chart, width, height, 0, Math.max(...sums) * 1.06 || 1);
  const slot = (px(chart.high) - px(chart.low)) / count;
  const bodies = [];
  for (let i = 0; i < count; i++) {
    const body = svg("g", { class: "bar" });
    const left = px(chart.from[i] - 0.5);
    const wide = px(chart.to[i] + 0.5) - left;
    let sum = 0;
    for (const bar of chart.bars) {
      const y = py(sum + bar.y[i]);
      const high = py(sum) - y;
      sum += bar.y[i];
      if (high > 0.05) body.append(svg("rect", { class: bar.color, x: left, y, width: Math.max(1, wide - (slot > 5 ? 1.5 : 0)), height: high }));
    }
    bodies.push(body);
    picture.append(body);
  }
  picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: floor + 0.5, y2: floor + 0.5 }));
  function mark(step) {
    const here = step === null ? -1 : nearest(chart.middles, step);
    for (const [i, body] of bodies.entries()) body.classList.toggle("dim", step !== null && i !== here);
  }
  return { picture, mark };
}
