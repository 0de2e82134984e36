// Elements, numbers and times as text. Text is only ever set as text, never as markup.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made[name] = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function clear(node) { node.replaceChildren(); return node; }
export function text(value) { return value === null || value === undefined || value === "" ? "–" : String(value); }

// Throws a TypeError where the dashboard cannot be reached, an Error with its answer where it refuses.
export async function ask(address) {
  const answer = await fetch(address, { credentials: "same-origin" });
  if (!answer.ok) throw new Error((await answer.text()) || `the dashboard answered ${answer.status}`);
  return answer;
}
export async function get(address) { return (await ask(address)).json(); }

export function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

export function short(value, digits = 3) {
  if (typeof value !== "number") return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) if (size >= limit) return `${(value / (limit === 1e4 ? 1e3 : limit)).toPrecision(digits)}${unit}`;
  return size >= 100 ? count(Math.round(value)) : String(Number(value.toPrecision(digits)));
}
export function count(value) { return typeof value === "number" ? value.toLocaleString("en") : "–"; }
export function percent(value) { return typeof value === "number" ? `${(value * 100).toFixed(value < 0.0995 && value > 0 ? 1 : 0)} %` : "–"; }
export function bytes(value, per = "") {
  if (typeof value !== "number") return "–";
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (value >= limit) return `${value / limit >= 1000 ? (value / limit).toFixed(0) : (value / limit).toPrecision(3)} ${unit}${per}`;
  return `${Math.round(value)} B${per}`;
}
export function seconds(value) {
  if (typeof value !== "number") return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.round((value % 86400) / 3600)} h`;
}
export function clock(at) { return typeof at === "number" ? new Date(at * 1000).toLocaleTimeString("en-GB") : "–"; }
export function date(at) { return typeof at === "number" ? new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "–"; }

export function panel(title, note, ...children) {
  return element("section", { class: "panel" }, element("h2", {}, title, note ? element("small", {}, note) : null), ...children);
}
export function table(columns, rows) {
  const head = element("tr", {}, ...columns.map(([label, kind]) => element("th", { class: kind || "" }, label)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, index) => {
    const made = element("td", { class: columns[index][1] || "" });
    made.append(cell instanceof Node ? cell : text(cell));
    return made;
  })));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}
export function badge(label, kind) { return element("span", { class: `badge ${kind || label}` }, label); }
export function card(label, value, more) {
  return element("div", { class: "card" }, element("div", { class: "label" }, label), element("div", { class: "value" }, value), more ? element("div", { class: "more" }, more) : null);
}
