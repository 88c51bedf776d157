"use strict";
// Finds cells by the numbers of the resolved plans: offset and strides of each layer, in bytes.
const data = JSON.parse(document.getElementById("data").textContent);
const said = document.getElementById("said");
const places = document.getElementById("places");
const query = document.getElementById("query");
let held = null;

const hex = (n) => "0x" + n.toString(16);

function viewOf(plan, layer) {
  const [name, group, offset, kind] = plan.layers[layer];
  return { name, group, offset, ...plan.kinds[kind] };
}

// manager block and token -> first byte of the cell
function cellStart(view, [, b, h, n]) {
  const block = b * view.ratio + Math.floor(n / view.shape[2]);
  return view.offset + block * view.strides[0] + h * view.strides[1] + (n % view.shape[2]) * view.strides[2];
}

function problem(plan, cell) {
  const limits = [["layer", plan.layers.length]];
  if (cell[0] < plan.layers.length) {
    const view = viewOf(plan, cell[0]);
    limits.push(["block", view.shape[0] / view.ratio], ["head", view.shape[1]], ["token", view.shape[2] * view.ratio]);
  }
  for (let i = 0; i < limits.length; i++)
    if (cell[i] >= limits[i][1]) return `${limits[i][0]} ${cell[i]}: expected one in [0, ${limits[i][1]})`;
  return null;
}

// each axis steps over all that the axes inside it reach: one division for each, outermost first
function owners(plan, byte) {
  const out = [];
  plan.layers.forEach((_, layer) => {
    const view = viewOf(plan, layer);
    let rest = byte - view.offset;
    if (rest < 0) return;
    const index = [0, 0, 0];
    const axes = [0, 1, 2].filter((a) => view.shape[a] > 1).sort((a, b) => view.strides[b] - view.strides[a]);
    for (const a of axes) {
      index[a] = Math.min(view.shape[a] - 1, Math.floor(rest / view.strides[a]));
      rest -= index[a] * view.strides[a];
    }
    if (rest >= view.shape[3]) return;
    const block = Math.floor(index[0] / view.ratio);
    out.push({ cell: [layer, block, index[1], (index[0] % view.ratio) * view.shape[2] + index[2]], rest, view });
  });
  return out;
}

// selectors of the cells to frame; none of them need be drawn
function mark(selectors) {
  document.querySelectorAll("rect.cell.on").forEach((rect) => rect.classList.remove("on"));
  for (const selector of selectors)
    document.querySelectorAll(selector).forEach((rect) => rect.classList.add("on"));
}

const inPanel = (plan, cell) => `svg[data-layout="${plan.layout}"] rect.cell[data-c="${cell.join(" ")}"]`;

function line(parts) {
  const div = document.createElement("div");
  for (const [tag, text] of parts) {
    const node = tag ? document.createElement(tag) : document.createTextNode(text);
    if (tag) node.textContent = text;
    div.append(node);
  }
  return div;
}

function words(plan, cell) {
  const view = viewOf(plan, cell[0]);
  const group = plan.groups > 1 ? `, group ${view.group}` : "";
  const isNull = plan.null_block && cell[1] === 0 ? "; the null block: held back, never written" : "";
  return `layer ${cell[0]} (${view.name}${group}), block ${cell[1]}, head ${cell[2]}, token ${cell[3]}${isNull}`;
}

function showCell(cell) {
  const wrong = problem(data.plans[0], cell);
  if (wrong) return showProblem(wrong);
  said.replaceChildren(line([["b", words(data.plans[0], cell)]]));
  places.replaceChildren(...data.plans.map((plan) => {
    const view = viewOf(plan, cell[0]);
    const start = cellStart(view, cell);
    const drawn = document.querySelector(inPanel(plan, cell));
    return line([["b", plan.layout], ["", "  bytes "], ["code", `${hex(start)} – ${hex(start + view.shape[3] - 1)}`],
      ["", drawn ? "" : " (left out of the picture)"]]);
  }));
  mark(data.plans.map((plan) => inPanel(plan, cell)));
}

function showByte(byte) {
  const size = Math.max(...data.plans.map((plan) => plan.size));
  if (byte >= size) return showProblem(`byte ${hex(byte)}: expected one in [0, ${hex(size)})`);
  said.replaceChildren(line([["b", `byte ${hex(byte)} (${byte.toLocaleString("en")})`]]));
  const found = [];
  places.replaceChildren(...data.plans.map((plan) => {
    if (byte >= plan.size) return line([["b", plan.layout], ["", "  past the allocation"]]);
    const here = owners(plan, byte);
    found.push(...here.map((owner) => inPanel(plan, owner.cell)));
    const text = here.map(({ cell, rest, view }) => {
      const part = view.key < 0 ? `byte ${rest}` : rest < view.key ? `K byte ${rest}` : `V byte ${rest - view.key}`;
      return `${words(plan, cell)}: ${part}`;
    });
    return line([["b", plan.layout], ["", "  " + (text.length ? text.join("; and ") : "padding")]]);
  }));
  mark(found);
}

function showProblem(text) {
  said.replaceChildren(line([["b", text]]));
  places.replaceChildren();
  mark([]);
}

function find(text) {
  const parts = text.trim().split(/[\s,]+/);
  if (parts.length === 4 && parts.every((part) => /^\d+$/.test(part))) return showCell(parts.map(Number));
  if (parts.length === 1 && /^(0x[0-9a-f]+|\d+)$/i.test(parts[0])) return showByte(Number(parts[0]));
  showProblem(`expected l b h n, or a byte such as 0x1F400, got ${text.trim() || "nothing"}`);
}

document.getElementById("form").addEventListener("submit", (event) => {
  event.preventDefault();
  held = query.value;
  find(held);
  history.replaceState(null, "", "#" + encodeURIComponent(held.trim()));
});
document.querySelector(".panels").addEventListener("mouseover", (event) => {
  const rect = event.target.closest("rect.cell");
  if (rect && held === null) showCell(rect.dataset.c.split(" ").map(Number));
});
document.querySelector(".panels").addEventListener("click", (event) => {
  const rect = event.target.closest("rect.cell");
  held = rect ? rect.dataset.c : null;
  query.value = held || "";
  if (rect) showCell(held.split(" ").map(Number));
});
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
function fromAddress() {
  const text = decodeURIComponent(location.hash.slice(1));
  if (!text) return false;
  query.value = held = text;
  find(text);
  return true;
}
addEventListener("hashchange", fromAddress);
if (!fromAddress()) showCell(data.first);
