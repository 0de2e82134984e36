// A chart as plain SVG: on the screen at once, while Plotly's script, which takes a second to load and run, is fetched; and instead of it
// where it cannot be loaded. The same traces and layout, without zoom and hover.
import { short } from "./dom.js";

const NUM_TICKS = 5;
const tick = (value) => short(value).replace(/\.0+(?=$| )/, "");
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round values from low to high: about NUM_TICKS of them, at least the ends' decades of a logarithmic axis.
function ticks(low, high, isLog) {
  if (isLog) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) found.push(...(high / low > 300 ? [1] : [1, 2, 5]).map((digit) => digit * 10 ** power));
    return found.filter((value) => value >= low && value <= high);
  }
  const rough = (high - low) / NUM_TICKS, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * unit).find((value) => value >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, index) => (first + index) * step);
}

function range(values, { isLog = false, fromZero = false, margin = 0 }) {
  const found = values.filter((value) => isNumber(value) && (!isLog || value > 0));
  if (!found.length) return [isLog ? 0.1 : 0, 1];
  let low = found.reduce((a, b) => Math.min(a, b)), high = found.reduce((a, b) => Math.max(a, b));
  if (fromZero) { low = Math.min(0, low); high = Math.max(0, high); }
  if (low === high) return isLog ? [low / 2, high * 2] : [low - (fromZero && !low ? 0 : Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  if (isLog) return [low / (high / low) ** margin, high * (high / low) ** margin];
  return [fromZero && low === 0 ? 0 : low - margin * (high - low), high + margin * (high - low)];
}

// `style`: colours and the font; `note`: a remark in the chart's corner.
export function sketch(div, traces, { x, y, isLog, fromZero, bars, lines, style, note }) {
  const width = div.clientWidth, height = div.clientHeight, shown = traces.filter((trace) => trace.showlegend !== false && trace.name);
  const left = y ? 62 : 50, right = 12, top = shown.length > 1 || note ? 26 : 10, bottom = x ? 40 : 24;
  const categories = bars ? [...new Set(traces.flatMap((trace) => trace.x))] : null;
  const [first, last] = categories ? [-0.5, categories.length - 0.5] : range(traces.flatMap((trace) => trace.x), { margin: 0 });
  const [low, high] = range(traces.flatMap((trace) => trace.y), { isLog, fromZero, margin: 0.05 });
  const scale = isLog ? Math.log : (value) => value;
  const across = (value) => left + ((value - first) / (last - first)) * (width - left - right);
  const up = (value) => height - bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom);
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "sketch", "font-size": 11, fill: style.quiet });
  for (const value of ticks(low, high, isLog)) svg.append(shape("line", { x1: left, x2: width - right, y1: up(value), y2: up(value), stroke: style.line }), shape("text", { x: left - 6, y: up(value) + 4, "text-anchor": "end" }, tick(value)));
  const marked = categories ? categories.map((name, index) => [index, name]).filter((_, index) => index % Math.ceil(categories.length / 10) === 0) : ticks(first, last, false).map((value) => [value, tick(value)]);
  for (const [value, name] of marked) svg.append(shape("text", { x: Math.min(across(value), width - 18), y: height - bottom + 16, "text-anchor": "middle" }, name));
  if (x) svg.append(shape("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", "font-size": 12 }, x));
  if (y) svg.append(shape("text", { x: 12, y: height / 2, "text-anchor": "middle", "font-size": 12, transform: `rotate(-90 12 ${height / 2})` }, y));
  traces.forEach((trace, index) => {
    const at = (name, place) => trace.x.map((value, point) => [value, name[point]]).filter(([value, each]) => isNumber(each) && (!isLog || each > 0) && (place || isNumber(value))).map(([value, each]) => [across(place ? place(value) : value), up(each)]);
    const tint = trace.line?.color || trace.marker?.color;
    if (bars) {
      const wide = Math.max(1, (0.75 * (width - left - right)) / categories.length);
      for (const [middle, end] of at(trace.y, (name) => categories.indexOf(name))) svg.append(shape("rect", { x: middle - wide / 2, y: Math.min(end, up(Math.max(low, 0))), width: wide, height: Math.abs(up(Math.max(low, 0)) - end), fill: tint }));
      return;
    }
    const points = at(trace.y);
    if (trace.fill) svg.append(shape("polygon", { points: [...points, ...at(traces[index - 1].y).reverse()].map((point) => point.map(Math.round).join()).join(" "), fill: trace.fillcolor }));
    else if (trace.line?.width) svg.append(shape("polyline", { points: points.map((point) => point.map((value) => value.toFixed(1)).join()).join(" "), fill: "none", stroke: tint, "stroke-width": trace.line.width, "stroke-linejoin": "round" }));
    if (trace.mode?.includes("markers")) for (const [cx, cy] of points) svg.append(shape("circle", { cx, cy, r: 3.5, fill: tint }));
  });
  for (const line of lines) svg.append(shape("line", { x1: across(line.x0), x2: across(line.x0), y1: top, y2: height - bottom, stroke: line.line.color, "stroke-width": line.line.width, "stroke-dasharray": "2 3" }));
  let begin = left;
  if (shown.length > 1 && !note) for (const trace of shown) {
    svg.append(shape("rect", { x: begin, y: 8, width: 14, height: 3, fill: trace.line?.color || trace.marker?.color }), shape("text", { x: begin + 19, y: 13, "font-size": 11.5 }, trace.name));
    begin += 34 + 6.5 * trace.name.length;
  }
  if (note) svg.append(shape("text", { x: left, y: 14 }, note));
  div.replaceChildren(svg);
}
