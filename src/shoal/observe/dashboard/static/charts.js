// Charts: a sketch at once, Plotly's once its script is there; and the lanes of workers, which are too many for it, on a canvas.
import { clear, colour } from "./dom.js";
import { sketch } from "./sketch.js";

const PALETTE = ["#0ea5e9", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#14b8a6", "#ec4899", "#84cc16", "#6366f1", "#f97316"];
const drawn = new Map(); // key -> its div: kept over updates, so that a zoom stays

// Plotly's script has 4.8 MB and takes most of a second to run: it is asked for when the first charts are on the screen.
let isAsked = false, isMissing = false;
function askForPlotly() {
  if (isAsked) return;
  isAsked = true;
  const script = document.createElement("script");
  script.src = "/static/plotly.min.js";
  script.onload = script.onerror = (event) => {
    isMissing = event.type === "error";
    for (const div of drawn.values()) setTimeout(() => { if (div.isConnected) div.redraw(); }); // one after the other: clicks get through
  };
  // After the frame that shows them, and what else the page has to do.
  requestAnimationFrame(() => (window.requestIdleCallback ?? setTimeout)(() => document.head.append(script)));
}

export function seriesColour(index) { return PALETTE[index % PALETTE.length]; }
export function forgetCharts() { for (const div of drawn.values()) window.Plotly?.purge(div); drawn.clear(); }

// The chart's div, the same one at every update; the caller puts it where it belongs.
export function chart(key, traces, { x = "", y = "", log = false, small = false, bars = false, fromZero = bars, shapes = [] } = {}) {
  let div = drawn.get(key);
  const isNew = !div;
  if (isNew) {
    div = document.createElement("div");
    div.className = small ? "chart small" : "chart";
    drawn.set(key, div);
  }
  const grid = colour("line"), quiet = colour("quiet");
  const axis = (title) => ({ title: { text: title, font: { size: 12 }, standoff: 8 }, gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickfont: { size: 11 }, automargin: true });
  const layout = {
    margin: { l: 8, r: 10, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: quiet, family: getComputedStyle(document.body).fontFamily },
    xaxis: axis(x), yaxis: { ...axis(y), type: log ? "log" : "linear", rangemode: fromZero ? "tozero" : "normal" }, hovermode: bars ? "closest" : "x unified",
    hoverlabel: { bgcolor: colour("card"), bordercolor: grid, font: { color: colour("text") } },
    showlegend: traces.filter((trace) => trace.showlegend !== false).length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11.5 } },
    uirevision: key, barmode: "group", shapes, bargap: 0.25,
  };
  div.redraw = () => {
    if (window.Plotly) {
      if (div.querySelector(".sketch")) clear(div);
      window.Plotly.react(div, traces.map(plain), layout, { displayModeBar: false, responsive: true, locale: "en" });
      return;
    }
    const note = isMissing ? "Plotly's script could not be loaded: no zoom, no values under the pointer." : "";
    sketch(div, traces, { x, y, isLog: log, fromZero, bars, lines: shapes, style: { line: grid, quiet }, note });
    askForPlotly();
  };
  // A chart is measured when it is drawn: it has to be in the page then.
  if (isNew || !div.isConnected) requestAnimationFrame(() => { if (div.isConnected) div.redraw(); }); else div.redraw();
  return div;
}

// Plotly takes names and categories for markup: those of a run are text.
function plain(trace) {
  const safe = (value) => (typeof value === "string" ? value.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;") : value);
  return { ...trace, ...(trace.name === undefined ? {} : { name: safe(trace.name) }), ...(trace.x?.some?.((x) => typeof x === "string") ? { x: trace.x.map(safe) } : {}) };
}

// A curve with the range of each bucket behind its mean.
export function band(curve, name, tint, { withBand = true } = {}) {
  const line = { type: "scatter", mode: curve.step.length === 1 ? "markers" : "lines", name, x: curve.step, y: curve.mean, line: { color: tint, width: 2 }, hovertemplate: "%{y:.5g}" };
  const differs = withBand && curve.low.some((low, index) => low !== curve.high[index]);
  if (!differs) return [line];
  const edge = { type: "scatter", mode: "lines", x: curve.step, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...edge, y: curve.low }, { ...edge, y: curve.high, fill: "tonexty", fillcolor: `${tint}2e` }, line];
}

export function faultLines(marks) {
  return marks.filter((mark) => typeof mark.step === "number").map((mark) => ({ type: "line", xref: "x", yref: "paper", x0: mark.step, x1: mark.step, y0: 0, y1: 1, line: { color: colour("bad"), width: 1.3, dash: "dot" } }));
}

// A lane per worker: each interval of about a second is a column, divided by where its time went.
export function lanes(canvas, workers, groups, lengthS, last) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || canvas.parentElement.clientWidth;
  const label = Math.min(110, width * 0.26), high = workers.length > 24 ? 18 : 32, axis = 22;
  const height = workers.length * high + axis;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  const tints = groups.map((group) => colour(group)), spanWidth = width - label - 4;
  // Only as far back as there is anything: a young run fills its lane.
  const oldest = Math.max(10, ...workers.flatMap((worker) => worker.lane.slice(0, 1).map((each) => -each[0])));
  const shown = Math.min(lengthS, oldest), place = (at) => label + spanWidth * (1 + Math.max(at, -shown) / shown);
  workers.forEach((worker, row) => {
    const top = row * high + 2, tall = high - 5;
    pen.fillStyle = worker.is_straggler ? colour("bad") : colour("text");
    pen.textAlign = "right";
    pen.fillText(`${worker.is_straggler ? "⚠ " : ""}${worker.process}`, label - 8, top + tall / 2);
    pen.fillStyle = colour("plain-back");
    pen.fillRect(label, top, spanWidth, tall);
    for (const [begin, end, ...shares] of worker.lane) {
      if (end <= -shown) continue;
      const x = Math.round(place(begin)), wide = Math.max(1, Math.round(place(end)) - x);
      let bottom = top + tall;
      shares.forEach((share, index) => {
        if (share <= 0) return;
        pen.fillStyle = tints[index];
        pen.fillRect(x, bottom - tall * share, wide, tall * share);
        bottom -= tall * share;
      });
    }
  });
  pen.fillStyle = colour("quiet");
  pen.textBaseline = "alphabetic";
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const at = -shown * (1 - share);
    pen.textAlign = share === 1 ? "right" : share === 0 ? "left" : "center";
    if (width > 520 || share * 2 === Math.round(share * 2)) pen.fillText(share === 1 ? last : `${at.toFixed(0)} s`, place(at), height - 5);
  }
}

export function into(node, ...children) { clear(node).append(...children.filter(Boolean)); }
