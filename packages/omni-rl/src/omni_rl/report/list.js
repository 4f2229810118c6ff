
// The list of runs, updated from its server.

const NEWS_S = 3;
const MOST = 8; // runs in a comparison
const TITLE = JSON.parse(document.getElementById("data").textContent).title;
let picked = []; // ids in the order of selection
const rows = new Map(); // a run's id -> {run, row, box}

function about(run) {
  const words = [run.trainer, run.trainer && run.trainer.endsWith(String(run.algo)) ? null : run.algo, run.model && String(run.model).split("/").pop()];
  return words.filter(Boolean).join(" \u00b7 ");
}

function address(ids) {
  return `report?${ids.map((id) => `run=${encodeURIComponent(id)}`).join("&")}`;
}

function sparkline({ x, y }) {
  if (y.length < 2) return null;
  const [low, high] = [Math.min(...y), Math.max(...y)];
  const at = (i) => `${(2 + (96 * (x[i] - x[0])) / (last(x) - x[0])).toFixed(1)} ${(high > low ? 20 - (16 * (y[i] - low)) / (high - low) : 12).toFixed(1)}`;
  const line = y.map((_, i) => `${i ? "L" : "M"}${at(i)}`).join("");
  return svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": `Held-out scores: ${alike(y).join(", ")}` },
    svg("path", { d: line }), svg("path", { class: "here", d: `M${at(y.length - 1)}h0.01` }));
}

function cells(run) {
  const title = el("th", { scope: "row" }, el("a", { href: address([run.id]) }, run.name), el("span", { class: "about" }, about(run)));
  if (run.error) return [title, el("td", { colspan: 4 }, el("span", { class: "pill" }, "damaged"), el("span", { class: "about" }, run.error))];
  const { word } = status(run);
  const steps = run.total === null ? plural(run.step, "step") : `step ${run.step} of ${run.total}`;
  const left = word === "running" && run.pace_s ? `, about ${duration((run.total - run.step) * run.pace_s)} left` : "";
  const now = word === "running" && run.now ? ` \u00b7 ${run.now.text}` : "";
  const held = run.held.y.length;
  return [title,
    el("td", {}, el("span", { class: `pill ${word}` }, word), el("span", { class: "about" }, steps + left + now)),
    el("td", { class: "held" }, held ? [el("strong", {}, fromTo(run.held.y)), sparkline(run.held)] : el("span", { class: "none" }, "none yet")),
    el("td", { class: "aside" }, run.started ? new Date(run.started).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : ""),
    el("td", { class: "aside" }, duration(run.seconds))];
}

function take(runs) {
  const known = new Set(runs.map((run) => run.id));
  for (const id of rows.keys()) if (!known.has(id)) rows.delete(id);
  for (const run of runs) {
    const text = JSON.stringify([run, run.error ? "" : status(run).word]);
    const entry = rows.get(run.id) || { box: picker(run), row: el("tr") };
    if (entry.text !== text) {
      entry.row.replaceChildren(el("td", { class: "pick" }, run.error ? null : entry.box), ...cells(run));
      entry.row.dataset.state = run.error ? "damaged" : status(run).word;
    }
    rows.set(run.id, Object.assign(entry, { run, text }));
  }
  const order = [...rows.values()].sort((a, b) => String(b.run.started || "").localeCompare(String(a.run.started || "")) || a.run.id.localeCompare(b.run.id));
  const wanted = order.map((entry) => entry.row);
  if (wanted.length !== body.children.length || wanted.some((row, i) => row !== body.children[i])) body.replaceChildren(...wanted);
  const going = order.filter((entry) => entry.row.dataset.state === "running").length;
  count.textContent = rows.size ? `${plural(rows.size, "run")}, ${going ? `${going} running` : "none running"}` : "No run here yet: one appears with its first line of metrics.";
  table.hidden = !rows.size;
  offer();
}

function picker(run) {
  const box = el("input", { type: "checkbox", value: run.id, "aria-label": `Compare ${run.name}` });
  box.addEventListener("change", () => {
    picked = box.checked ? [...picked, run.id] : picked.filter((id) => id !== run.id);
    offer();
  });
  return box;
}

function offer() {
  picked = picked.filter((id) => rows.has(id));
  for (const box of body.querySelectorAll("input")) box.disabled = !box.checked && picked.length >= MOST;
  compare.hidden = picked.length < 2;
  compare.href = address(picked);
  compare.textContent = `Compare ${picked.length} runs`;
  hint.textContent = picked.length ? `${picked.length} of at most ${MOST} chosen` : "Choose two or more runs to compare them.";
}

async function ask() {
  try {
    const answer = await fetch("runs.json");
    if (!answer.ok) throw new Error(answer.statusText);
    take(await answer.json());
  } catch {
    count.textContent = "The server does not respond; this is its last answer.";
  }
  setTimeout(ask, NEWS_S * 1000);
}

const count = el("p", { class: "status", role: "status" }, "Reading the runs\u2026");
const body = el("tbody");
const compare = el("a", { class: "button", hidden: true });
const hint = el("span", { class: "none" });
const headings = ["Run", "State", "Held-out score", "Started", "Training time"].map((name, i) => el("th", { scope: "col", class: i > 2 ? "aside" : null }, name));
const table = el("div", {}, el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, el("td"), headings)), body)),
  el("p", { class: "compare" }, compare, hint));
document.getElementById("page").replaceChildren(el("header", {}, el("p", { class: "mark-line" }, "omni-rl"), el("h1", {}, TITLE), count), table);
table.hidden = true;
ask();
