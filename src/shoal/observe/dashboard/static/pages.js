// Pages: what is drawn of each view. A view is plain values from the server; nothing is computed here that it does not say.
import { ask, badge, bytes, card, clock, colour, count, date, element, get, panel, percent, seconds, short, table, text } from "./dom.js";
import { band, chart, faultLines, into, lanes, seriesColour } from "./charts.js";

export function describeRun(node, head) {
  const parts = [head.strategy, `${text(head.workers)} worker${head.workers === 1 ? "" : "s"}`];
  if (head.servers) parts.push(`${head.servers} server${head.servers === 1 ? "" : "s"}`);
  if (head.hosts > 1) parts.push(`${head.hosts} hosts`);
  into(node, element("strong", { title: head.script }, head.name), badge(head.state), element("span", { class: "facts" }, parts.filter(Boolean).join(" · ")));
}

function sampled(unread) {
  return unread ? element("p", { class: "notice" }, `A long run: the curves are from a sample of its steps until the other ${bytes(unread)} are read.`) : null;
}
function notices(view) {
  const found = view.loss ? [sampled(view.head.unread_bytes)] : [];
  if (view.head.error) found.push(element("p", { class: "notice bad" }, view.head.error));
  return found;
}

function empty(why) { return element("p", { class: "quiet" }, why); }

// A loss that fell by more than this is a flat line on a linear axis.
function isWide(values) {
  const found = values.filter((value) => typeof value === "number");
  return found.length > 0 && found.every((value) => value > 0) && Math.max(...found) > 50 * Math.min(...found);
}

function overview(main, view) {
  const { progress, loss, rate, head } = view;
  const isOver = head.state !== "alive";
  const steps = progress.num_steps ? `of ${count(progress.num_steps)}` : "";
  const epochs = typeof progress.epoch === "number" ? `epoch ${progress.epoch}${progress.num_epochs ? ` of ${progress.num_epochs}` : ""}` : "";
  const cards = element("div", { class: "cards" },
    card("step", count(progress.step), [steps, epochs].filter(Boolean).join(" · ")),
    card("loss", short(progress.loss, 4), "newest step"),
    card("samples/s", short(progress.samples_per_s), isOver ? "over the whole run" : "now"),
    isOver ? card("took", seconds(progress.seconds), progress.samples ? `${count(progress.samples)} samples` : "") : card("time left", seconds(progress.eta_s), `so far ${seconds(progress.seconds)}`),
    ...Object.entries(view.final).filter(([name]) => name !== "loss").slice(0, 6).map(([name, value]) => card(name, short(value, 4), isOver ? "at the end" : "last epoch")),
    card("restarts", count(head.restarts), head.restarts ? "see events" : "none"));
  const bar = element("div", { class: "progress", role: "progressbar" }, element("div", { style: { width: `${100 * (progress.done || 0)}%` } }));
  const answers = element("div", { class: "answers" }, ...view.answers.map((each) => element("div", { class: `card answer ${each.level}` }, element("b", {}, each.question), each.answer)));
  const accent = seriesColour(0), marks = faultLines(view.marks), markNote = marks.length ? "dotted: a process died" : "";
  const traces = band(loss, "loss", accent);
  const validated = view.epochs.val_loss || [];
  if (validated.length) traces.push({ type: "scatter", mode: "lines+markers", name: "val_loss", x: validated.map(([step]) => step), y: validated.map(([, value]) => value), line: { color: seriesColour(1), width: 2 }, marker: { size: 7 } });
  const isLog = isWide(loss.mean);
  const charts = [panel("Loss", [isLog ? "logarithmic" : "", markNote].filter(Boolean).join("; "), loss.step.length ? chart("loss", traces, { x: "step", shapes: marks, log: isLog }) : empty("no step yet"))];
  charts.push(panel("Samples per second", "", rate.step.length ? chart("rate", [{ type: "scatter", mode: "lines", name: "samples/s", x: rate.step, y: rate.rate, line: { color: seriesColour(2), width: 2 }, hovertemplate: "%{y:.4g}" }], { x: "step", shapes: marks, fromZero: true }) : empty("needs two steps")));
  const metrics = { ...view.epochs };
  delete metrics.loss; delete metrics.val_loss;
  const grouped = {};
  for (const [name, points] of Object.entries(metrics)) (grouped[name.replace(/^val_/, "")] ||= []).push([name, points]);
  for (const [base, lines] of Object.entries(grouped)) {
    charts.push(panel(base, "by epoch", chart(`epoch-${base}`, lines.map(([name, points], index) => ({ type: "scatter", mode: "lines+markers", name, x: points.map(([step]) => step), y: points.map(([, value]) => value), line: { color: seriesColour(index), width: 2 }, marker: { size: 8 } })), { x: "step", small: true })));
  }
  for (const [name, curve] of Object.entries(view.metrics)) charts.push(panel(name, "by step", chart(`metric-${name}`, band(curve, name, seriesColour(3)), { x: "step", small: true })));
  into(main, ...notices(view), cards, bar, answers, element("div", { class: "columns" }, ...charts), element("p", { class: "quiet mono" }, head.script));
}

function legend(groups) { return element("div", { class: "legend" }, ...groups.map((group) => element("span", {}, element("i", { style: { background: colour(group) } }), group))); }

function share(shares, groups) {
  return element("div", { class: "share", title: groups.filter((group) => shares[group]).map((group) => `${group} ${percent(shares[group])}`).join(", ") }, ...groups.map((group) => element("i", { style: { background: colour(group), width: `${100 * (shares[group] || 0)}%` } })));
}

function workers(main, view) {
  const found = view.workers, recorded = found.some((worker) => worker.lane.length);
  const slow = found.filter((worker) => worker.is_straggler);
  const running = found.filter((worker) => worker.state === "running").length;
  const canvas = element("canvas", { class: "lanes", role: "img", "aria-label": "time of each worker" });
  const parts = [
    element("div", { class: "cards" }, card("workers", count(found.length), view.head.state === "alive" ? `${running} running` : view.head.state), card("stragglers", count(slow.length), slow.map((worker) => worker.process).join(", ") || "none"), card("samples/s", short(found.some((worker) => worker.samples_per_s) ? found.reduce((sum, worker) => sum + (worker.samples_per_s || 0), 0) : null), "all workers, last 30 s"), card("memory", bytes(found.reduce((sum, worker) => sum + (worker.rss_bytes || 0), 0)), "resident, all workers")),
    panel("Where the time goes", `each column is about a second of a worker, last ${Math.round(view.length_s / 60)} min`, legend(view.groups), element("div", { style: { height: "8px" } }), recorded ? canvas : empty("This run has no activity files: it was written by an older version, or has just begun.")),
    panel("Workers", "last 30 s", table(
      [["worker"], ["state"], ["step", "number"], ["samples/s", "number"], ["time"], ["compute", "number"], ["waiting", "number"], ["slowness", "number"], ["traffic", "number"], ["memory", "number"], ["cpu", "number"], ["leases", "number"], ["restarts", "number"], ["pid", "number"]],
      found.map((worker) => [worker.host === null || worker.host === undefined ? worker.process : `${worker.process} @ host ${worker.host}`, worker.is_straggler ? badge("straggler", "bad") : badge(worker.state), count(worker.step), short(worker.samples_per_s), share(worker.shares, view.groups), percent(worker.shares.compute), percent(worker.shares.waiting), worker.slowness ? `${worker.slowness.toFixed(2)} ×` : "–", bytes(worker.bytes_per_s, "/s"), bytes(worker.rss_bytes), percent(worker.cpu), worker.leases ? `${count(worker.leases[0])} · ${count(worker.leases[1])} samples` : "–", count(worker.restarts), text(worker.pid)]))),
    element("p", { class: "quiet" }, `Slowness: the time of a step in which a worker waits for nobody, against the median of the others. Above ${view.straggles} ×, and by more than a twentieth of its time, it is marked as a straggler.`),
  ];
  into(main, ...notices(view), ...parts);
  if (recorded) lanes(canvas, found, view.groups, view.length_s, view.head.state === "alive" ? "now" : "end");
}

function servers(main, view) {
  const found = view.servers;
  if (!found.length) { into(main, ...notices(view), panel("Servers", "", empty("This run has no parameter servers: its strategy keeps the weights in the workers."))); return; }
  const tables = {};
  for (const server of found) for (const [name, rows] of Object.entries(server.rows)) tables[name] = (tables[name] || 0) + rows;
  const series = Object.entries(view.series).filter(([, each]) => each.at.length);
  const lines = (key) => series.map(([name, each], index) => ({ type: "scatter", mode: "lines", name, x: each.at, y: each[key], line: { color: seriesColour(index), width: 1.8 }, connectgaps: true }));
  const stale = Object.entries(view.staleness), from = `seconds from ${view.head.state === "alive" ? "now" : "the end"}`;
  into(main, ...notices(view),
    element("div", { class: "cards" }, card("servers", count(found.length), view.head.state), ...(view.row_cache_hit_rate == null ? [] : [card("row cache", percent(view.row_cache_hit_rate), "of rows found at the worker")]), card("slots", count(view.num_slots), `${text(view.replicas)} cop${view.replicas === 1 ? "y" : "ies"} of each`), card("rows", count(Object.values(tables).reduce((a, b) => a + b, 0)), `in ${Object.keys(tables).length} table${Object.keys(tables).length === 1 ? "" : "s"}, copies included`), card("memory", bytes(found.reduce((sum, server) => sum + (server.rss_bytes || 0), 0)), "resident, all servers")),
    panel("Servers", "last 30 s", table([["server"], ["state"], ["primary", "number"], ["replica", "number"], ["filling", "number"], ["load", "number"], ["queue", "number"], ["in", "number"], ["out", "number"], ["memory", "number"], ["restarts", "number"], ["tables", "wrap"]],
      found.map((server) => [server.process, badge(server.state), count(server.primary), count(server.replica), count(server.filling), percent(server.load), seconds(server.queue_s), bytes(server.received_per_s, "/s"), bytes(server.sent_per_s, "/s"), bytes(server.rss_bytes), count(server.restarts), Object.entries(server.rows).map(([name, rows]) => `${name} ${count(rows)} rows`).join(", ") || "–"]))),
    element("div", { class: "columns" },
      panel("Staleness", "how old the weights of a push were, in clocks", stale.length ? chart("staleness", [{ type: "bar", x: stale.map(([age]) => age), y: stale.map(([, number]) => number), marker: { color: seriesColour(3) }, name: "pushes" }], { x: "clocks behind", y: "pushes", bars: true, small: true }) : empty("none recorded: an exact strategy has no stale weights")),
      panel("Queue delay", "ms", series.length ? chart("queue", lines("queue_ms"), { x: from, small: true, fromZero: true }) : empty("no activity recorded")),
      panel("Bytes per second", "in and out", series.length ? chart("bytes", lines("bytes_per_s"), { x: from, small: true, fromZero: true }) : empty("no activity recorded")),
      panel("Load", "share of time at work", series.length ? chart("load", lines("load"), { x: from, small: true, fromZero: true }) : empty("no activity recorded"))));
}

function data(main, view) {
  const ranks = Object.entries(view.workers).sort(([a], [b]) => a - b);
  const skipped = view.epochs.reduce((sum, epoch) => sum + epoch.num_skipped, 0);
  const trained = ranks.reduce((sum, [, had]) => sum + had.samples, 0);
  const wrong = view.epochs.some((epoch) => epoch.missing.length || epoch.doubled.length);
  const verdict = !view.check.length ? "no ledger" : wrong ? "NOT exact" : view.epochs.every((epoch) => epoch.is_exact) ? "exactly once" : "so far right";
  const kind = (line) => (/TWICE|NOT trained/.test(line) ? "wrong" : /exactly once/.test(line) ? "" : "open");
  into(main, ...notices(view),
    element("div", { class: "cards" }, card("ledger check", verdict, "each sample of each epoch"), card("samples trained", trained ? count(trained) : "–", "that count"), card("skipped", count(skipped), skipped ? "bad samples, listed below" : "none"), card("left of the epoch", count(view.left), view.left ? "samples" : "")),
    panel("Ledger", view.sharding ? `cut: ${view.sharding}` : "", view.check.length ? element("ul", { class: "check" }, ...view.check.map((line) => element("li", { class: kind(line) }, line))) : empty("Nothing is in the ledger of this run yet.")),
    ...(ranks.length ? [panel("Samples by worker", "", chart("by-worker", [{ type: "bar", x: ranks.map(([rank]) => `worker-${rank}`), y: ranks.map(([, had]) => had.samples), marker: { color: seriesColour(0) }, hovertemplate: "%{y:,} samples" }], { y: "samples", bars: true, small: true }))] : []),
    ...(view.epochs.length ? [panel("Shards", "who trained which part of each epoch", ...view.epochs.slice(-12).map(shards), shardLegend(view.epochs))] : []),
    ...(Object.keys(view.holds).length ? [panel("Leases held now", "", table([["worker"], ["samples", "wrap"]], Object.entries(view.holds).map(([rank, held]) => [`worker-${rank}`, held.map(([start, stop]) => `${count(start)}…${count(stop - 1)}`).join(", ")])))] : []),
    ...(skipped || view.skips.length ? [panel("Skips", "", table([["epoch"], ["samples", "wrap"]], view.epochs.filter((epoch) => epoch.num_skipped).map((epoch) => [`epoch ${epoch.epoch + 1}`, epoch.skipped.map(count).join(", ")])), table([["time"], ["event"], ["facts", "wrap"]], view.skips.map((event) => eventRow(event, new Set()))))] : []));
}

function shards(epoch) {
  const total = Math.max(epoch.samples || 0, ...epoch.ranges.map((range) => range.stop), 1);
  const pieces = epoch.ranges.flatMap((range) => {
    const ranks = Object.entries(range.by_rank), sum = ranks.reduce((all, [, samples]) => all + samples, 0) || 1;
    let at = range.start;
    return ranks.map(([rank, samples]) => {
      const long = ((range.stop - range.start) * samples) / sum, left = at;
      at += long;
      return element("i", { title: `rank ${rank}: ${count(samples)} samples of ${count(range.start)}…${count(range.stop - 1)}, ${range.sharding}, launch ${range.launch}`, style: { left: `${(100 * left) / total}%`, width: `${(100 * long) / total}%`, background: seriesColour(Number(rank)) } });
    });
  });
  return element("div", { style: { margin: "8px 0" } }, element("div", { class: "quiet", style: { fontSize: "12.5px" } }, `epoch ${epoch.epoch + 1}: ${count(epoch.trained)}${epoch.samples ? ` of ${count(epoch.samples)}` : ""} samples`), element("div", { class: "ranges" }, ...pieces));
}
function shardLegend(epochs) {
  const ranks = [...new Set(epochs.flatMap((epoch) => epoch.ranges.flatMap((range) => Object.keys(range.by_rank))))].map(Number).sort((a, b) => a - b).slice(0, 16);
  return element("div", { class: "legend" }, ...ranks.map((rank) => element("span", {}, element("i", { style: { background: seriesColour(rank) } }), `worker-${rank}`)));
}

const HIDDEN = new Set(["time", "monotonic", "event"]);
// {"0": {"primary": 128, "filling": 0}} as "0 (primary 128)".
function facts(value) {
  if (value === null || typeof value !== "object") return text(value);
  if (Array.isArray(value)) return value.map(facts).join(", ");
  return Object.entries(value).filter(([, each]) => each !== 0).map(([name, each]) => (each !== null && typeof each === "object" ? `${name} (${facts(each)})` : `${name} ${each}`)).join(", ");
}
// The first incarnation, and a view for which nobody had state to give: nothing to tell.
const isUsual = (name, value) => (name === "incarnation" && value === 0) || (["donor", "finished"].includes(name) && value === -1);
const processOf = (event) => (typeof event.rank === "number" ? `worker-${event.rank}` : typeof event.server === "number" ? `server-${event.server}` : text(event.event).split("-")[0]);
function eventRow(event, deaths) {
  const told = Object.entries(event).filter(([name, value]) => !HIDDEN.has(name) && !isUsual(name, value)).map(([name, value]) => `${name} ${value !== null && typeof value === "object" ? facts(value) : typeof value === "number" ? Number(value.toPrecision(6)) : value}`).join(", ");
  // Servers are killed when a job is over: an exit is bad where the server calls it a death.
  const bad = /-exited$/.test(event.event) ? deaths.has(`${processOf(event)} ${event.time}`) : /lost|fault|failed|skip/.test(event.event);
  return [clock(event.time), badge(text(event.event), bad ? "bad" : /replaced|live|resumed/.test(event.event) ? "good" : "plain"), told];
}

let wanted = "";
function events(main, view) {
  const found = view.faults;
  const search = element("input", { type: "search", placeholder: "filter events", "aria-label": "filter events", value: wanted });
  const list = element("div"), deaths = new Set(found.map((fault) => `${fault.process} ${fault.at}`));
  const fill = () => {
    wanted = search.value;
    const rows = [...view.events].reverse().map((event) => eventRow(event, deaths)).filter((row) => !wanted || `${row[1].textContent} ${row[2]}`.toLowerCase().includes(wanted.toLowerCase()));
    into(list, rows.length ? table([["time"], ["event"], ["facts", "wrap"]], rows) : empty("no such event"));
  };
  search.oninput = fill;
  const healed = found.filter((fault) => typeof fault.live_after_s === "number").map((fault) => fault.live_after_s);
  const isTyping = document.activeElement?.type === "search";
  into(main, ...notices(view),
    element("div", { class: "cards" }, card("deaths", count(found.length), found.length ? found.at(-1).process : "none"), card("restarts", count(view.head.restarts), ""), card("time to recover", healed.length ? seconds(healed.reduce((a, b) => a + b, 0) / healed.length) : "–", "mean, from death to work"), card("longest", healed.length ? seconds(Math.max(...healed)) : "–", "")),
    panel("Deaths and recoveries", "", found.length ? table([["time"], ["process"], ["cause"], ["at step", "number"], ["replaced after", "number"], ["at work after", "number"], ["view", "number"], ["state from"]],
      [...found].reverse().map((fault) => [clock(fault.at), badge(fault.process, "bad"), text(fault.signal), count(fault.step), seconds(fault.replaced_after_s), seconds(fault.live_after_s), text(fault.view), typeof fault.donor === "number" && fault.donor >= 0 ? `worker-${fault.donor}` : "–"])) : empty("No process of this run died.")),
    panel("Events", view.events.length < view.num_kept ? `the newest ${view.events.length} of ${count(view.num_kept)}` : "", search, list));
  fill();
  if (isTyping) { search.focus(); search.setSelectionRange(wanted.length, wanted.length); }
}

async function graph(main, view) {
  const recorded = view.graph, layers = recorded.layers || [];
  if (!layers.length) { into(main, ...notices(view), panel("Graph", "", empty("No graph was recorded: the run has not begun its first step, or is of an older version."))); return; }
  const answer = await ask(`/graph/${encodeURIComponent(view.head.name)}.svg`);
  const drawing = new DOMParser().parseFromString(await answer.text(), "image/svg+xml").documentElement;
  const sent = (recorded.communication || []).reduce((sum, each) => sum + (each.bytes || 0), 0);
  const by = {};
  for (const each of recorded.communication || []) by[each.what] = (by[each.what] || 0) + (each.bytes || 0);
  const held = main.querySelector(".drawing");
  const [left, top] = held ? [held.scrollLeft, held.scrollTop] : [null, 0];
  into(main, ...notices(view),
    element("div", { class: "cards" }, card("layers", count(layers.length), `${count((recorded.edges || []).length)} edges`), card("parameters", short(layers.reduce((sum, layer) => sum + (layer.parameters || 0), 0)), bytes(layers.reduce((sum, layer) => sum + (layer.parameter_bytes || 0), 0))), card("communication", bytes(sent), "a step, as the strategy inserted it"), view.exchange.exchange ? card("measured", bytes(view.exchange.sent_bytes_per_step), `gradients a step, ${view.exchange.exchange}`) : ""),
    panel("Graph", text(recorded.note), element("div", { class: "legend" }, ...[["source", "#60a5fa"], ["on servers", "#c084fc"], ["cut over workers", "#f59e0b"]].map(([label, tint]) => element("span", {}, element("i", { style: { background: tint } }), label)), element("a", { href: `/graph/${encodeURIComponent(view.head.name)}.svg`, download: `${view.head.name}.svg` }, "SVG")), element("div", { style: { height: "8px" } }), element("div", { class: "drawing" }, document.importNode(drawing, true))),
    ...(Object.keys(by).length ? [panel("Communication the strategy inserted", "bytes per step", table([["what", "wrap"], ["bytes", "number"]], Object.entries(by).map(([what, number]) => [what, number ? bytes(number) : "as many as a batch touches"])))] : []),
    panel("Layers", "", table([["layer"], ["kind"], ["output"], ["parameters", "number"], ["where"], ["how", "wrap"]], layers.map((layer) => [layer.name, layer.kind, layer.shape, count(layer.parameters), layer.where, layer.how]))));
  const box = main.querySelector(".drawing");
  box.scrollTop = top;
  box.scrollLeft = left === null ? (box.scrollWidth - box.clientWidth) / 2 : left;
}

export async function listRuns(main) {
  const found = await get("/api/runs");
  into(main, panel(`${found.runs.length} run${found.runs.length === 1 ? "" : "s"}`, "newest first", found.runs.length ? table([["run"], ["state"], ["strategy"], ["workers", "number"], ["step", "number"], ["loss", "number"], ["samples/s", "number"], ["started"]],
    found.runs.map((run) => [element("a", { href: `/run/${encodeURIComponent(run.name)}/overview` }, run.name), badge(run.state), text(run.strategy), count(run.workers), count(run.step), short(run.loss, 4), short(run.samples_per_s), date(run.started)])) : empty("No runs here yet: shoal run -n 2 train.py makes one.")));
}

const chosen = new Set();
let known = null, overTime = false;
export async function compareRuns(main) {
  if (known === null) {
    known = (await get("/api/runs")).runs;
    for (const run of known.slice(0, 4)) chosen.add(run.name);
  }
  const view = chosen.size ? await get(`/api/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`) : { runs: [], differing: {} };
  const told = () => dispatchEvent(new Event("chosen"));
  const boxes = element("div", { class: "chosen" }, ...known.slice(0, 60).map((run) => element("label", {}, element("input", { type: "checkbox", name: run.name, ...(chosen.has(run.name) ? { checked: "" } : {}), onchange: (event) => { if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name); told(); } }), run.name)));
  const axis = element("select", { "aria-label": "axis", onchange: (event) => { overTime = event.target.value === "time"; told(); } }, element("option", { value: "step" }, "by step"), element("option", { value: "time", ...(overTime ? { selected: "" } : {}) }, "by time"));
  const at = (run) => (overTime ? interpolated(run.loss.step, run.rate) : run.loss.step);
  const loss = view.runs.map((run, index) => ({ type: "scatter", mode: "lines", name: run.head.name, x: at(run), y: run.loss.mean, line: { color: seriesColour(index), width: 2 }, hovertemplate: "%{y:.5g}" }));
  const rate = view.runs.map((run, index) => ({ type: "scatter", mode: "lines", name: run.head.name, x: overTime ? run.rate.seconds : run.rate.step, y: run.rate.rate, line: { color: seriesColour(index), width: 2 }, hovertemplate: "%{y:.4g}" }));
  const names = view.runs.map((run) => [run.head.name, "number"]), metrics = [...new Set(view.runs.flatMap((run) => Object.keys(run.final)))];
  const best = Math.max(...view.runs.map((run) => run.progress.samples_per_s || 0));
  const rows = [["state", ...view.runs.map((run) => badge(run.head.state))], ["strategy", ...view.runs.map((run) => text(run.head.strategy))], ["workers", ...view.runs.map((run) => count(run.head.workers))], ["steps", ...view.runs.map((run) => count(run.progress.step))], ["samples/s", ...view.runs.map((run) => `${short(run.progress.samples_per_s)}${run.progress.samples_per_s === best ? " ★" : ""}`)], ["took", ...view.runs.map((run) => seconds(run.progress.seconds))], ["restarts", ...view.runs.map((run) => count(run.head.restarts))], ...metrics.map((name) => [name, ...view.runs.map((run) => short(run.final[name], 4))])];
  const differing = Object.entries(view.differing).map(([name, values]) => [name, ...values.map((value) => (value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value)))]);
  into(main, sampled(view.runs.reduce((sum, run) => sum + (run.head.unread_bytes || 0), 0)), boxes, axis, element("div", { style: { height: "12px" } }), ...(view.runs.length ? [
    element("div", { class: "columns" }, panel("Loss", "mean of each bucket", chart("compare-loss", loss, { x: overTime ? "seconds" : "step" })), panel("Samples per second", "", chart("compare-rate", rate, { x: overTime ? "seconds" : "step", fromZero: true }))),
    panel("Results", "★ fastest", table([[""], ...names], rows)), panel("Settings that differ", "", differing.length ? table([["setting"], ...names], differing) : empty("none"))] : [empty("Choose runs above.")]));
  return view.runs;
}
compareRuns.chosen = () => [...chosen];

function interpolated(steps, rate) {
  let index = 0;
  return steps.map((step) => {
    while (index < rate.step.length - 1 && rate.step[index] < step) index += 1;
    return rate.seconds[index] ?? null;
  });
}

export const PAGES = { overview, workers, servers, data, events, graph };
