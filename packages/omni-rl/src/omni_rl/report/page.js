
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MANY = RUNS.length > 1;
const COLORS = MANY ? ["c1", "c6", "c3", "c4", "c7", "c8", "c5", "c2"] : ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const STILL = matchMedia("(prefers-reduced-motion: reduce)").matches;
const KEPT = history.state || {}; // survives a reload of the page

// Words.

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}

function section(title, note, ...children) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), note ? el("p", { class: "lead" }, note) : null, ...children);
}

// The head: the run, its progress and its main numbers.

function head() {
  const title = MANY ? `${RUNS.length} runs` : RUNS[0].name;
  const home = DATA.live ? [" / ", el("a", { href: "./" }, "all runs")] : [];
  const parts = [el("p", { class: "mark-line" }, "omni-rl", home), el("h1", {}, title)];
  if (MANY) {
    parts.push(el("p", { class: "status" }, RUNS.map((run) => run.name).join(", "), DATA.live ? reloader(RUNS.find(isGoing)) : null));
  } else {
    const { word, text } = status(RUNS[0]);
    const start = last(RUNS[0].starts);
    const commit = start && start.commit ? ` \u00b7 commit ${start.commit.slice(0, 7)}` : "";
    parts.push(el("p", { class: "status" }, el("span", { class: `pill ${word}` }, word), ` ${text}${commit}`, reloader(RUNS[0])));
    if (word === "running") parts.push(el("progress", { max: RUNS[0].total, value: RUNS[0].step, "aria-label": "steps done" }));
  }
  return el("header", {}, parts);
}

function reloader(run) {
  if (!run || !isGoing(run)) return null;
  const pause = DATA.live ? 10 : 30;
  const box = el("input", { type: "checkbox", checked: KEPT.reload !== false });
  box.addEventListener("change", () => keep({ reload: box.checked }));
  let touched = 0;
  for (const name of ["pointerdown", "pointermove", "keydown", "scroll"]) addEventListener(name, () => { touched = Date.now(); }, { passive: true });
  setInterval(() => {
    const isUsed = document.querySelector("dialog") || [...document.querySelectorAll("audio")].some((sound) => !sound.paused);
    if (box.checked && !isUsed && !document.hidden && Date.now() - touched > 10000) location.reload();
  }, pause * 1000);
  return el("label", { class: "reload" }, box, `reload every ${pause} s`);
}

function keep(state) {
  Object.assign(KEPT, state);
  history.replaceState(KEPT, "");
}

function tile(label, value, note) {
  return el("div", {}, el("dt", {}, label), el("dd", {}, el("strong", {}, value), note ? el("span", {}, note) : null));
}

function tiles(run) {
  const { "eval/reward": held, "reward/mean": train, "perf/samples_per_s": speed, "perf/peak_memory_mb": memory } = run.curves;
  const made = [];
  if (held) {
    const change = held.y.length > 1 ? `${signed(last(held.y) - held.y[0])} since step ${show(held.x[0])}` : "";
    made.push(tile("Held-out score", fromTo(held.y), change));
  }
  if (train) {
    const part = train.y.slice(-10);
    made.push(tile("Training reward", show(part.reduce((a, b) => a + b, 0) / part.length), part.length > 1 ? `mean of the last ${part.length} ${train.low ? "points" : "steps"}` : ""));
  }
  const rate = speed ? `, ${show(median(speed.y.slice(-10)))} samples/s per device` : "";
  if (run.step_s) made.push(tile("Seconds per step", show(run.step_s), `median of training steps${rate}`));
  const peak = memory && Math.max(...memory.y);
  if (memory) made.push(tile("Peak memory", peak >= 10240 ? `${show(peak / 1024)} GB` : `${show(peak)} MB`, "first rank"));
  return made.length ? el("dl", { class: "tiles" }, made) : null;
}

function swatch(i) {
  return el("i", { class: COLORS[i % 8], "aria-hidden": "true" });
}

function runTable() {
  const rows = RUNS.map((run, i) => {
    const held = run.curves["eval/reward"];
    const start = last(run.starts);
    return el("tr", {}, el("th", { scope: "row" }, swatch(i), run.name),
      el("td", {}, `${status(run).word}, ${run.step} steps`), el("td", {}, held ? fromTo(held.y) : "none"),
      el("td", {}, show(run.step_s)), el("td", {}, start && start.commit ? start.commit.slice(0, 7) : "none"));
  });
  const names = ["Run", "State", "Held-out score", "Seconds per step", "Commit"];
  const headings = el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of runs" }, el("table", {}, el("thead", {}, headings), el("tbody", {}, rows)));
}

// The settings that define a held-out score. A run names its scorer, or a server by its URL.
const SCORED = [
  "scorer.name", "reward", "thought_reward", "eval.prompts", "eval.num_prompts", "eval.samples_per_prompt", "eval.num_inference_steps",
  "height", "width", "num_frames", "guidance_scale", "true_cfg_scale", "guidance", "max_new_tokens", "eval.temperature", "eval.top_p",
];

function scoredUnlike() {
  const values = (name) => RUNS.map((run) => word(name.split(".").reduce((found, key) => (found || {})[key], run.config)));
  const differ = SCORED.filter((name) => new Set(values(name)).size > 1);
  if (!differ.length) return null;
  const items = differ.map((name) => el("li", {}, el("code", {}, name), `: ${RUNS.map((run, i) => `${run.name} ${values(name)[i] || "none"}`).join(", ")}`));
  return el("div", { class: "unlike", role: "note" }, el("strong", {}, "The scores of these runs are not comparable."), " They differ in", el("ul", {}, items));
}

function alarms() {
  const rows = RUNS.flatMap((run) => run.alarms.map((alarm) => ({ run, alarm })));
  if (!rows.length) return null;
  const items = rows.map(({ run, alarm }) => el("li", {},
    el("strong", {}, alarm.title), el("span", { class: "step" }, `${MANY ? `${run.name}, ` : ""}step ${show(alarm.step)}`),
    el("p", {}, Object.entries(alarm.numbers || {}).map(([name, value]) => el("code", {}, `${name} ${show(value)}`))),
    alarm.look ? el("p", { class: "look" }, `Look at: ${alarm.look}`) : null));
  return section("Alarms", "", el("ul", { class: "alarms" }, items));
}

// Curves.

// Explanation of the points of a thinned curve.
function thinned(curves) {
  const curve = curves.find((points) => points.low && !points.error);
  if (!curve) return "";
  const steps = Math.max(2, Math.round((last(curve.x) - curve.x[0]) / (curve.x.length - 1)));
  return ` A point is the mean of about ${steps} steps, the shade their range.`;
}

function domain() {
  const steps = RUNS.flatMap((run) => Object.values(run.curves).flatMap((curve) => [curve.x[0], last(curve.x)]));
  return { low: Math.min(...steps), high: Math.max(...steps) };
}

// The lines of a chart: its metrics for one run; for several runs, one line per run of the first metric that changes.
function linesOf(spec) {
  if (!MANY) {
    const found = Object.entries(spec.lines).filter(([name]) => RUNS[0].curves[name]);
    return found.map(([name, label], i) => ({ label, name, color: COLORS[i % 8], smooth: spec.smooth, ...RUNS[0].curves[name] }));
  }
  const names = Object.keys(spec.lines).filter((name) => RUNS.some((run) => run.curves[name]));
  const drawn = names.map((name) => {
    const lines = RUNS.map((run, i) => ({ label: run.name, name, color: COLORS[i % 8], smooth: spec.smooth, ...run.curves[name] }));
    return Object.assign(lines.filter((line) => line.x), { metric: spec.lines[name] });
  });
  return drawn.find((lines) => !lines.every(isSteady)) || drawn[0] || [];
}

function chartOf(spec) {
  const lines = linesOf(spec);
  if (!lines.length) return null;
  const smoothed = lines.some((line) => line.smooth && line.x.length > LONG);
  const note = spec.note + (smoothed ? " The strong line is a moving mean." : "") + (spec.section === "reward" ? thinned(lines) : "") +
    (lines.some((line) => line.error) ? " The shade is one standard error over the prompts." : "");
  const title = MANY && lines.metric && Object.keys(spec.lines).length > 1 ? `${spec.title}: ${lines.metric}` : spec.title;
  return chartFigure({ title, note: note.trim(), tall: spec.section === "reward", lines, ...domain() });
}

function timeChart(run) {
  const { from, to, seconds } = run.phases;
  if (!from.length) return null;
  const middles = from.map((step, i) => (step + to[i]) / 2);
  const names = Object.keys(seconds).filter((name) => Math.max(...seconds[name]) > 0);
  const color = (name, i) => (name === "rest" ? "c0" : ["c6", "c5", "c3", "c7", "c4", "c2", "c8", "c1"][i % 8]);
  const bars = names.map((name, i) => ({ label: name, name: name === "rest" ? null : `time/${name.replaceAll(" ", "_")}_s`, color: color(name, i), x: middles, y: seconds[name] }));
  const note = "Where the seconds of a step go, on the first rank.";
  return chartFigure({ title: "Seconds per step", note, bars, middles, from, to, low: from[0] - 0.5, high: last(to) + 0.5 });
}

function chartsOf(name) {
  return DATA.charts.filter((spec) => spec.section === name).map(chartOf);
}

// The charts, and below them the cards of constant metrics.
function grids(figures, kind = "charts") {
  const made = figures.filter(Boolean);
  const steady = made.filter((figure) => figure.classList.contains("steady"));
  const moving = made.filter((figure) => !steady.includes(figure));
  return [moving, steady].filter((part) => part.length).map((part) => el("div", { class: kind }, part));
}

function policySection() {
  const made = grids(chartsOf("policy"));
  const note = `Point at a step to show its values in all charts; arrow keys do the same.${thinned(RUNS.flatMap((run) => Object.values(run.curves)))}`;
  return made.length ? section("Policy", note, made) : null;
}

function speedSection() {
  const spec = { section: "speed", title: "Seconds per step", note: "", lines: { "time/step_s": "" }, smooth: true };
  const made = grids([MANY ? chartOf(spec) : timeChart(RUNS[0]), ...chartsOf("speed")], "charts two");
  return made.length ? section("Time and memory", "", made) : null;
}

function otherSection() {
  const drawn = new Set(["time/step_s", ...DATA.charts.flatMap((spec) => Object.keys(spec.lines))]);
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].filter((name) => !drawn.has(name)).sort();
  if (!names.length) return null;
  const details = el("details", {}, el("summary", {}, plural(names.length, "more metric")));
  const spec = (name) => ({ section: "other", title: name, note: "", lines: { [name]: "value" }, smooth: false });
  details.addEventListener("toggle", () => details.append(...grids(names.map((name) => chartOf(spec(name))))), { once: true });
  return details;
}

// Images.

// The range of the score bars: 0 to 1 if it holds all scores.
function scoreRange() {
  const pictures = RUNS.flatMap((run) => [...run.evals.flatMap((e) => e.pictures), ...run.groups.flatMap((g) => g.shown)]);
  const scores = [...pictures.map((picture) => picture && picture.reward), ...RUNS.flatMap((run) => run.groups.flatMap((g) => g.rewards))];
  const known = scores.filter((score) => score !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  if (!known.length || (low >= 0 && high <= 1 && (high === 0 || high >= 0.01))) return { low: 0, high: 1 };
  return { low: low >= 0 && low < 0.6 * high ? 0 : low, high: high > low ? high : low + 1 };
}

const RANGE = scoreRange();

function scoreShare(score) {
  return (score - RANGE.low) / (RANGE.high - RANGE.low);
}

function scoreText(score) {
  const size = Math.max(Math.abs(RANGE.low), Math.abs(RANGE.high));
  const places = Math.max(2, 1 - Math.floor(Math.log10(RANGE.high - RANGE.low)));  // enough to distinguish scores
  return places > 6 || (places === 2 && size >= 100) ? show(score) : score.toFixed(places);
}

function said(picture) {
  const { target, read, ...others } = picture.details;
  const parts = [];
  const say = (name, value) => parts.push(el("span", {}, `${name} `, el("code", {}, value)), " ");
  if (read !== undefined) say("read", read === "" ? "nothing" : read);
  if (target !== undefined && target !== read) say("wanted", target);
  for (const [name, value] of Object.entries(others)) say(name, value);
  if (picture.reward === null) parts.push(el("span", {}, picture.abstained || "the scorer gave no score"));
  return parts;
}

// The change of a score since the first image.
function chip(picture, base) {
  if (!base || base.reward === null || picture.reward === null) return null;
  const change = Number(scoreText(picture.reward)) - Number(scoreText(base.reward));
  if (!Number(scoreText(change))) return null;
  const text = `${change < 0 ? "\u2212" : "+"}${scoreText(Math.abs(change))}`;
  return el("span", { class: change > 0 ? "chip up" : "chip down", title: "compared with the first image" }, text);
}

function pane(label, picture, prompt, mark = null, base = null) {
  const title = el("span", { class: "label", title: label }, mark, label);
  if (!picture) return el("div", { class: "pane" }, el("p", { class: "pane-head" }, title), el("p", { class: "none" }, "no image"));
  const [width, height] = picture.size;
  const src = (STILL && picture.strip) || picture.src;
  const drawn = !src ? null : /^data:video|\.webm$/.test(src)
    ? el("video", { src, width, height, "aria-label": `${label}: ${prompt}`, autoplay: true, loop: true, playsinline: true })
    : el("img", { src, width, height, alt: `${label}: ${prompt}`, class: Math.max(width, height) <= 128 ? "exact" : null, decoding: "async", loading: DATA.live ? "lazy" : null });
  if (drawn) drawn.muted = true; // browsers autoplay only muted videos
  const text = picture.answer === undefined ? null : el("p", { class: "answer" }, picture.answer);
  const shown = [drawn && zoom(drawn, label, picture, prompt), frames(picture, label), sound(picture, label, prompt), text];
  if (picture.reward === undefined) return el("div", { class: "pane" }, el("p", { class: "pane-head" }, title), shown);
  const bar = el("div", { class: "bar-of-score", "aria-hidden": "true" }, el("i"));
  const share = picture.reward === null ? 0 : scoreShare(picture.reward);
  bar.firstChild.style.width = `${(100 * share).toFixed(1)}%`;
  return el("div", { class: "pane" }, el("p", { class: "pane-head" }, title, el("strong", {}, picture.reward === null ? "no score" : scoreText(picture.reward))),
    shown, bar, el("p", { class: "said" }, chip(picture, base), said(picture)));
}

// Some frames of a video side by side, shown on hover or focus.
function frames(picture, label) {
  return picture.strip ? el("img", { src: picture.strip, class: "frames", alt: `Frames of ${label}`, decoding: "async" }) : null;
}

function sound(picture, label, prompt) {
  return picture.sound ? el("audio", { src: picture.sound, controls: true, preload: "metadata", "aria-label": `Sound of ${label}: ${prompt}` }) : null;
}

// The references of a sample, without scores.
function referencePanes(references, prompt) {
  return references.map((picture, i) => pane(references.length > 1 ? `reference ${i + 1}` : "reference", picture, prompt));
}

// An image that opens in full size on click.
function zoom(image, label, picture, prompt) {
  const button = el("button", { type: "button", class: "zoom", "aria-label": `Enlarge ${label}: ${prompt}` }, image);
  button.addEventListener("click", () => {
    const large = image.cloneNode();
    large.muted = true;
    const close = el("button", { type: "button" }, "Close");
    const box = el("dialog", { class: "large", "aria-label": `${label}: ${prompt}` }, large, frames(picture, label), el("p", {}, prompt), el("p", { class: "said" }, said(picture)), close);
    box.addEventListener("click", () => box.close());
    box.addEventListener("close", () => box.remove());
    document.body.append(box);
    box.showModal();
  });
  return button;
}

// The prompt, truncated to a few lines, with the full text on hover.
function caption(prompt) {
  return el("figcaption", { title: prompt }, prompt);
}

function shape(picture) {
  return picture && picture.size[0] > 1.6 * picture.size[1] ? "panes wide" : "panes";
}

// The panes of a card at `step`: for one run, the first evaluation and this one; else one pane per run.
function panesAt(prompt, step) {
  const same = (other) => other.text === prompt.text && other.seed === prompt.seed;
  const at = (run, wanted) => {
    const chosen = last(run.evals.filter((e) => e.step <= wanted)) || run.evals[0];
    const picture = chosen && chosen.pictures[run.prompts.findIndex(same)];
    return picture ? { label: `step ${chosen.step}`, picture } : { label: "", picture: null };
  };
  if (MANY) {
    const name = (run, label) => (label ? `${run.name}, ${label}` : run.name);
    return RUNS.map((run) => ({ run, ...at(run, step) }))
      .map(({ run, label, picture }, i) => ({ label: name(run, label), picture, mark: swatch(i) }));
  }
  const first = RUNS[0].evals[0].step;
  const shown = (wanted) => ({ ...at(RUNS[0], wanted), label: `step ${wanted}` });
  return step === first ? [shown(first)] : [shown(first), shown(step)];
}

function scoreHistory(prompt, step) {
  if (MANY || RUNS[0].evals.length < 3) return null;
  const i = RUNS[0].prompts.indexOf(prompt);
  const scores = RUNS[0].evals.map((e) => (e.pictures[i] ? e.pictures[i].reward : null));
  const here = RUNS[0].evals.findIndex((e) => e.step === step);
  const x = (n) => 4 + (n / (scores.length - 1)) * 92;
  const y = (score) => 20 - scoreShare(score) * 16;
  const known = scores.map((score, n) => [n, score]).filter(([, score]) => score !== null);
  if (!known.length) return null;
  const line = known.map(([n, score], k) => `${k ? "L" : "M"}${x(n).toFixed(1)} ${y(score).toFixed(1)}`).join("");
  const label = `Scores at the evaluations: ${scores.map((score) => (score === null ? "none" : scoreText(score))).join(", ")}`;
  const dots = known.filter(([n]) => n === here).map(([n, score]) => svg("line", { class: "here", x1: x(n), x2: x(n), y1: y(score), y2: y(score) }));
  return svg("svg", { class: "history", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("line", { class: "base", x1: 4, x2: 96, y1: 21, y2: 21 }), svg("path", { d: line }), dots);
}

function pictureSection() {
  const steps = [...new Set(RUNS.flatMap((run) => run.evals.map((e) => e.step)))].sort((a, b) => a - b);
  const source = RUNS.find((run) => run.prompts.length);
  if (!source) return null;
  const cards = source.prompts.map((prompt) => {
    const body = el("div", { class: "panes" });
    const past = el("div", {});
    return { prompt, body, past, text: prompt.text, scores: [], card: el("figure", { class: MANY ? "card row" : "card" }, caption(prompt.text), body, past) };
  });
  const grid = few(cards, MANY ? null : last(source.evals).pictures.find(Boolean), "pictures");
  const control = evaluationSlider(steps, (step) => {
    for (const card of cards) {
      const { prompt, body, past } = card;
      const panes = panesAt(prompt, step);
      const [base, ...others] = panes.map((p) => p.picture);
      card.scores = (MANY || !others.length ? [base, ...others] : others).filter(Boolean).map((picture) => picture.reward);
      body.className = shape((panes.find((p) => p.picture) || {}).picture);
      body.replaceChildren(...referencePanes(prompt.references, prompt.text), ...panes.map((p, i) => pane(p.label, p.picture, prompt.text, p.mark, i ? base : null)));
      past.replaceChildren(...[scoreHistory(prompt, step)].filter(Boolean));
    }
    grid.update();
  });
  const note = MANY ? "The same prompts and seeds in every run." : "The same prompts and seeds: the first evaluation, and the one that the slider chooses.";
  const title = last(source.evals).pictures.some((picture) => picture && picture.answer !== undefined) ? "Answers" : "Images";
  return section(title, note, control, grid.bar, grid.whole);
}

// Cards {card, text, scores}: the first eight, all after a click on the button, or those that match the filter.
function few(cards, picture, name) {
  const grid = el("div", { class: MANY ? "rows" : shape(picture).replace("panes", "cards") }, cards.map(({ card }) => card));
  const more = el("button", { type: "button" }, `Show all ${cards.length}`);
  const kept = { text: "", low: "", high: "", ...KEPT[name] };
  const told = el("output", { class: "none" });
  let all = cards.length <= 8;
  more.addEventListener("click", () => { all = true; update(); });
  function update() {
    const [low, high] = [kept.low, kept.high].map((value, i) => (value === "" || Number.isNaN(Number(value)) ? [-Infinity, Infinity][i] : Number(value)));
    const asked = low > -Infinity || high < Infinity;
    const found = cards.filter(({ text, scores }) => text.toLowerCase().includes(kept.text.toLowerCase())
      && (!asked || scores.some((score) => score !== null && score >= low && score <= high)));
    const isFull = all || found.length < cards.length;
    for (const { card } of cards) card.hidden = true;
    for (const { card } of isFull ? found : found.slice(0, 8)) card.hidden = false;
    more.hidden = isFull;
    told.textContent = found.length < cards.length ? `${found.length} of ${cards.length}` : "";
  }
  function field(key, label, attributes) {
    const input = el("input", { value: kept[key], "aria-label": `${label} (${name})`, ...attributes });
    input.addEventListener("input", () => {
      kept[key] = input.value.trim();
      keep({ [name]: { ...kept } });
      update();
    });
    return input;
  }
  const score = { inputmode: "decimal", class: "number" };
  const bar = cards.length < 4 ? null : el("p", { class: "filter", role: "search", "aria-label": `Filter ${name}` },
    field("text", "Prompt contains", { type: "search", placeholder: "Prompt contains\u2026" }),
    el("span", {}, "score ", field("low", "Lowest score", { ...score, placeholder: show(RANGE.low) }), " to ", field("high", "Highest score", { ...score, placeholder: show(RANGE.high) })), told);
  update();
  return { bar, whole: el("div", {}, grid, more), update };
}

function evaluationSlider(steps, showStep) {
  const range = el("input", { type: "range", min: 0, max: steps.length - 1, step: 1, id: "evaluation", disabled: steps.length < 2 });
  const text = el("output", { for: "evaluation" });
  function update() {
    const step = steps[range.value];
    const held = MANY ? null : RUNS[0].curves["eval/reward"];
    const i = held ? held.x.indexOf(step) : -1;
    const score = i < 0 ? "" : `held-out ${alike(held.y)[i]}`;
    text.replaceChildren(el("strong", {}, `after ${plural(step, "step")}`), el("span", {}, score));
    range.setAttribute("aria-valuetext", `after ${plural(step, "step")} ${score}`);
    showStep(step);
  }
  const kept = steps.indexOf(KEPT.evaluation);
  range.value = kept < 0 ? steps.length - 1 : kept;
  range.addEventListener("input", () => {
    update();
    keep({ evaluation: Number(range.value) === steps.length - 1 ? null : steps[range.value] });
    moveCursor(steps[range.value]);
  });
  update();
  const marks = steps.map((step) => el("span", {}, steps.length <= 9 ? String(step) : ""));
  return el("div", { class: "control" }, el("label", { for: "evaluation" }, "Evaluation"), range, text,
    el("div", { class: "marks", "aria-hidden": "true" }, marks));
}

function groupSection() {
  if (MANY || !RUNS[0].groups.length) return null;
  const cards = RUNS[0].groups.map((group) => {
    const known = group.rewards.filter((reward) => reward !== null).length;
    const names = group.shown.length > 1 ? ["best", "worst"] : [["first", "the only score"][known] || "all alike"];
    const panes = [...referencePanes(group.references, group.prompt), ...group.shown.map((picture, i) => pane(names[i], picture, group.prompt))];
    const card = el("figure", { class: "card" }, caption(group.prompt), el("div", { class: shape(group.shown[0]) }, panes), strip(group),
      el("p", { class: "note" }, `group of ${group.rewards.length}, step ${show(group.step)}`));
    return { card, text: group.prompt, scores: group.rewards };
  });
  const grid = few(cards, RUNS[0].groups[0].shown[0], "groups");
  return section("Recent groups", "Best and worst sample of the latest groups, and the scores of all samples of each.", grid.bar, grid.whole);
}

function strip(group) {
  const known = group.rewards.filter((reward) => reward !== null);
  const x = (score) => 3 + scoreShare(score) * 94;
  const missing = group.rewards.length - known.length;
  const label = `Scores of the group: ${known.map(scoreText).join(", ")}${missing ? `; ${missing} without score` : ""}`;
  return el("div", { class: "strip", role: "img", "aria-label": label, title: label }, known.map((score) => {
    const dot = el("i");
    dot.style.left = `${x(score).toFixed(1)}%`;
    return dot;
  }));
}

// Settings and origin.

function pairs(entries) {
  return el("dl", { class: "settings" }, entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, word(value)))));
}

function word(value) {
  return value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
}

function origin(run) {
  const start = last(run.starts);
  if (!start) return null;
  const { command, packages, changed, ...facts } = start;
  const text = el("pre", {}, el("code", {}, command.split(" ").flatMap((part) => [el("span", {}, part), " "])));
  return el("div", { class: "origin" }, el("h3", {}, "Origin"), text, copier(command, text),
    pairs(Object.entries(facts).filter(([, value]) => value !== "")),
    run.starts.length > 1 ? el("p", { class: "note" }, `Started ${run.starts.length} times; this is the last start.`) : null,
    el("details", {}, el("summary", {}, "Versions"), pairs(Object.entries(packages || {}))));
}

// A button that copies a text, or selects its element if the clipboard is not accessible.
function copier(text, place) {
  const button = el("button", { type: "button" }, "Copy command");
  button.addEventListener("click", async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else getSelection().selectAllChildren(place);
    button.textContent = navigator.clipboard ? "Copied" : "Selected: copy it with Ctrl+C";
    setTimeout(() => { button.textContent = "Copy command"; }, 2000);
  });
  return button;
}

// All settings; if known, the changed ones come first and the others are folded.
function settings(run) {
  const changed = new Set((last(run.starts) || {}).changed);
  const entries = Object.entries(run.config);
  if (!entries.length) return null;
  const some = entries.filter(([name]) => changed.has(name));
  if (!some.length) return pairs(entries);
  const others = entries.filter(([name]) => !changed.has(name));
  return el("div", {}, pairs(some), el("details", {}, el("summary", {}, `${plural(others.length, "setting")} at the default`), pairs(others)));
}

function settingSection() {
  const runs = RUNS.filter((run) => Object.keys(run.config).length || run.starts.length);
  if (!runs.length) return null;
  if (!MANY) return section("Settings", "", settings(RUNS[0]), origin(RUNS[0]));
  const all = RUNS.map((run) => ({ ...run.config, ...flat(last(run.starts)) }));
  const names = [...new Set(all.flatMap((config) => Object.keys(config)))].filter((name) => new Set(all.map((c) => word(c[name]))).size > 1);
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), all.map((config) => el("td", {}, word(config[name])))));
  const headings = el("tr", {}, el("th", { scope: "col" }, "Setting"), RUNS.map((run, i) => el("th", { scope: "col" }, swatch(i), run.name)));
  const table = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of settings" },
    el("table", {}, el("thead", {}, headings), el("tbody", {}, rows)));
  return section("Settings that differ", "", rows.length ? table : el("p", {}, "None."),
    runs.map((run) => el("details", {}, el("summary", {}, `All settings of ${run.name}`), settings(run), origin(run))));
}

function flat(start) {
  if (!start) return {};
  const { packages, command, started, changed, ...facts } = start;
  return { ...facts, ...packages };
}

function rewardSection() {
  const specs = DATA.charts.filter((spec) => spec.section === "reward");
  const alone = (spec) => Object.entries(spec.lines).map(([name, label]) => ({ ...spec, title: `${spec.title}: ${label}`, note: "", lines: { [name]: label } }));
  const made = grids((MANY ? specs.flatMap(alone) : specs).map(chartOf), "charts one");
  return made.length ? el("div", { class: "hero" }, made) : null;
}

function foot() {
  const logged = new Date(Math.max(...RUNS.map((run) => run.logged_at)) * 1000);
  return el("footer", {}, `Last step logged ${logged.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" })}. ${DATA.live ? "" : "This file needs no network. "}docs/metrics.md explains the metrics; point at a chart's title or legend for their names.`);
}

// Links to the sections, always visible.
function navigation(sections) {
  const links = sections.filter((part) => part && part.tagName === "SECTION").map((part) => part.querySelector("h2"));
  if (links.length < 3) return null;
  const line = el("nav", { "aria-label": "Sections" }, [["page", "Top"], ...links.map((h2) => [h2.id, h2.textContent])].map(([id, text]) => el("a", { href: `#${id}` }, text)));
  new ResizeObserver(() => document.documentElement.style.setProperty("--nav", `${line.offsetHeight}px`)).observe(line);
  return line;
}

const EMPTY = RUNS.every((run) => !Object.keys(run.curves).length);
const SECTIONS = [alarms(), rewardSection(), pictureSection(), groupSection(), policySection(), speedSection(), otherSection(), settingSection()];
document.getElementById("page").replaceChildren(...[
  head(), navigation(SECTIONS), MANY ? runTable() : tiles(RUNS[0]), MANY ? scoredUnlike() : null, EMPTY ? el("p", { class: "lead" }, "No step is logged yet.") : null, ...SECTIONS, foot(),
].filter(Boolean));
