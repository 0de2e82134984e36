// Router of the dashboard: which page of which run, its data, and the stream that says when to fetch it again.
import { clear, element, get, text } from "./dom.js";
import { PAGES, listRuns, compareRuns, describeRun } from "./pages.js";
import { forgetCharts } from "./charts.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
let place = null; // what is shown
let source = null;
let isFetching = false, isStale = false, isOver = false;
let restsUntil = 0; // by performance.now()
const MAX_SHARE = 0.2; // of its time that a page spends on updates: often the browser shares its cores with the workers

function read() {
  const [, kind, name, page] = location.pathname.split("/").map(decodeURIComponent);
  if (kind === "run") return { kind, name, page: page || "overview" };
  return { kind: kind === "compare" ? "compare" : "runs" };
}

function address(next) {
  return next.kind === "run" ? `/run/${encodeURIComponent(next.name)}/${next.page}` : next.kind === "compare" ? "/compare" : "/";
}

function navigation() {
  const nav = clear(document.getElementById("nav"));
  const link = (label, next, isHere) => nav.append(element("a", { href: address(next), class: isHere ? "here" : "" }, label));
  link("runs", { kind: "runs" }, place.kind === "runs");
  if (place.kind === "run") for (const page of Object.keys(PAGES)) link(page, { kind: "run", name: place.name, page }, place.page === page);
  link("compare", { kind: "compare" }, place.kind === "compare");
  nav.querySelector(".here")?.scrollIntoView({ block: "nearest", inline: "center" });
}

async function show() {
  place = read();
  forgetCharts();
  navigation();
  clear(main).append(element("p", { class: "quiet" }, "reading …"));
  main.dataset.ready = main.dataset.version = "";
  if (place.kind !== "run") clear(document.getElementById("run"));
  document.title = place.kind === "run" ? `${place.name} · ${place.page} · shoal` : "shoal";
  await refresh();
  listen();
}

// One fetch at a time: what changes meanwhile is fetched once, afterwards.
async function refresh() {
  if (isFetching) { isStale = true; return; }
  isFetching = true;
  const asked = place, began = performance.now();
  try {
    if (asked.kind === "runs") await listRuns(main);
    else if (asked.kind === "compare") {
      isOver = (await compareRuns(main)).every((run) => run.head.state !== "alive");
      if (source?.readyState === EventSource.OPEN) connected();
    }
    else {
      const view = await get(`/api/run/${encodeURIComponent(asked.name)}/${asked.page}`);
      if (asked === place) {
        describeRun(document.getElementById("run"), view.head);
        isOver = view.head.state !== "alive";
        if (source?.readyState === EventSource.OPEN) connected();
        await PAGES[asked.page](main, view);
        main.dataset.version = view.version;
      }
    }
    main.dataset.ready = "yes";
  } catch (error) {
    const hasEnded = error instanceof TypeError && error.message.includes("fetch");
    if (hasEnded) ended();
    // What is on the screen is the last that is known of the run: it stays when the dashboard ends with its job.
    if (asked === place && !(hasEnded && main.dataset.ready)) clear(main).append(element("p", { class: "notice bad" }, hasEnded ? "The dashboard ended, or cannot be reached." : text(error.message)));
  } finally {
    isFetching = false;
    restsUntil = performance.now() + (performance.now() - began) * (1 / MAX_SHARE - 1);
    if (asked !== place) { isStale = false; refresh(); } else if (isStale) { isStale = false; update(); }
  }
}

// A change: fetched at once, or after the rest; what changes meanwhile comes with it.
let waiting = 0;
function update() {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (document.hidden) isStale = true; else refresh(); }, restsUntil - performance.now());
}

function listen() {
  source?.close();
  const names = place.kind === "run" ? [place.name] : place.kind === "compare" ? compareRuns.chosen() : [];
  if (!names.length) { live.textContent = ""; live.className = "live"; return; }
  source = new EventSource(`/api/stream?runs=${names.map(encodeURIComponent).join(",")}`);
  source.onopen = connected;
  source.onmessage = (event) => { if (event.data !== main.dataset.version) update(); }; // the first one mostly tells of what is shown
  source.onerror = ended;
}

// A run that is over may be resumed: the page goes on listening, and does not call it live.
function connected() { live.className = isOver ? "live" : "live on"; live.textContent = isOver ? "ended" : "live"; }
function ended() { live.className = "live off"; live.textContent = "dashboard ended"; }

document.addEventListener("visibilitychange", () => { if (!document.hidden && isStale) { isStale = false; refresh(); } });
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || link.hasAttribute("download")) return;
  event.preventDefault();
  history.pushState(null, "", link.getAttribute("href"));
  show();
});
addEventListener("popstate", show);
addEventListener("chosen", () => { refresh(); listen(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show(); // a module runs when the document is parsed: waiting for DOMContentLoaded too fetched and drew everything twice
