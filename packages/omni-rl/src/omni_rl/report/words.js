
// Texts shared by all pages.

function duration(seconds) {
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function last(items) {
  return items[items.length - 1];
}

function isGoing(run) {
  const patience = 120 + 10 * (run.pace_s || 0);
  const seen = Math.max(run.logged_at, run.now ? run.now.at : 0);
  return run.total !== null && run.step < run.total && Date.now() / 1000 - seen < patience;
}

function status(run) {
  if (isGoing(run)) {
    const left = run.pace_s ? `, about ${duration((run.total - run.step) * run.pace_s)} left` : "";
    const now = run.now ? ` \u00b7 ${run.now.text}` : "";
    return { word: "running", text: `step ${run.step} of ${run.total}${left}${now}` };
  }
  const done = run.total !== null && run.step >= run.total;
  const of = run.total !== null && !done ? ` of ${run.total}` : "";
  const word = done ? "finished" : run.total === null ? "logged" : "stopped";
  return { word, text: `${run.step}${of} steps in ${duration(run.seconds)}` };
}

function signed(value) {
  return (value < 0 ? "\u2212" : "+") + show(Math.abs(Number(value.toPrecision(2))));
}

function fromTo(values) {
  const [first, now] = alike([values[0], last(values)]);
  return values.length > 1 ? `${first} \u2192 ${now}` : now;
}
