// The page: every text from the data enters through textContent, nothing is ever parsed as markup.
const data = JSON.parse(document.getElementById("lineage").textContent);
const nodes = new Map(data.nodes.map((node) => [node.checkpoint_digest, node]));
const get = (id) => document.getElementById(id);
const [view, canvas, cards, lines, list, search, details] = ["view", "canvas", "cards", "lines", "list", "search", "details"].map(get);
const FOLD_FROM = 6, FOLD_WHEN = 30;

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
function shape(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// --- words ---------------------------------------------------------------------------------------------------
const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const power = bytes < 1000 ? 0 : Math.min(5, Math.floor(Math.log10(bytes) / 3));
  return `${power ? (bytes / 1000 ** power).toPrecision(3) : bytes} ${units[power]}`;
}
function large(number) {
  const [scale, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"]].find(([least]) => number >= least) ?? [1, ""];
  return unit ? `${(number / scale).toPrecision(3)}${unit}` : number.toLocaleString("en");
}
const moment = (text) => text.replace("T", " ").replace(/\.\d+/, "").replace(/([+-]\d\d:\d\d)$/, " $1");
const digits = (digest) => digest.slice(digest.indexOf(":") + 1);
const short = (digest) => digest.slice(0, digest.indexOf(":") + 13);
const stepOf = (node) => (node.step === null ? "" : `step ${node.step.toLocaleString("en")}`);
const present = (node) => node.places.filter((place) => !place.gone);
const isGone = (node) => node.places.length > 0 && !present(node).length;
const uriOf = (node) => (present(node)[0] ?? node.places[0])?.uri ?? "";
function tail(uri) {
  const parts = uri.split("/").filter(Boolean);
  return { parent: parts.length > 1 ? `${parts.at(-2)} / ` : "", name: parts.at(-1) ?? "(place unknown)" };
}
const versions = (node) => node.registrations.filter((row) => row.version !== null);

// --- colours: one a format, in the order of appearance ---------------------------------------------------------
const tints = new Map();
for (const node of data.nodes) if (!tints.has(node.format)) tints.set(node.format, `var(--c${Math.min(tints.size, 7)})`);
function tinted(element, format) {
  element.style.setProperty("--tint", tints.get(format) ?? "var(--c7)");
  return element;
}

// --- relations -------------------------------------------------------------------------------------------------
const parents = new Map(data.nodes.map((node) => [node.checkpoint_digest, []]));
const children = new Map(data.nodes.map((node) => [node.checkpoint_digest, []]));
for (const edge of data.edges) {
  parents.get(edge.target).push(edge);
  children.get(edge.source).push(edge);
}
function reached(start, relation, end) {
  const found = new Set();
  const waiting = [start];
  while (waiting.length) {
    for (const edge of relation.get(waiting.pop())) {
      if (found.has(edge)) continue;
      found.add(edge);
      waiting.push(edge[end]);
    }
  }
  return found;
}

// --- folding: leaves of one format with the same neighbours are one card until it is opened --------------------
const opened = new Set();
const stacks = new Map(); // name → members
const stackOf = new Map();
function sortIntoStacks() {
  const byKey = new Map();
  for (const node of data.nodes) {
    const id = node.checkpoint_digest;
    const up = parents.get(id).map((edge) => edge.source), down = children.get(id).map((edge) => edge.target);
    if (id === data.root || (up.length && down.length)) continue;
    const key = JSON.stringify([node.format, node.kind, up.sort(), down.sort()]);
    if (!byKey.has(key)) byKey.set(key, []);
    byKey.get(key).push(node);
  }
  for (const [key, members] of byKey) {
    if (members.length < FOLD_FROM) continue;
    members.sort((one, two) => (one.step ?? 0) - (two.step ?? 0));
    stacks.set(`stack ${key}`, members);
    for (const node of members) stackOf.set(node.checkpoint_digest, `stack ${key}`);
  }
}
function cardOf(digest) {
  const stack = stackOf.get(digest);
  return stack && get("fold").checked && !opened.has(stack) ? stack : digest;
}

// --- cards -----------------------------------------------------------------------------------------------------
function heading(node, step) {
  const swatch = tinted(make("span", "swatch"), node.format);
  return make("span", "top", swatch, make("span", "format name", node.format), make("span", "step", step));
}
function whereabouts(node) {
  const { parent, name } = tail(uriOf(node));
  return make("span", "where", make("span", "parent name", parent), make("span", "name", name));
}
// A checkpoint that was only read is neither good nor bad: nothing was recorded that its bytes could be compared with.
const grades = { ok: ["good", "✓"], read: ["", "○"] };
function gradeOf(outcome) {
  return grades[outcome.verdict] ?? ["bad", "✗"];
}
function mark(node) {
  if (isGone(node)) return make("span", "mark warn", "deleted");
  if (!node.verified) return null;
  const [grade, sign] = gradeOf(node.verified);
  const word = grade === "good" ? node.verified.level : node.verified.verdict;
  return make("span", `mark ${grade}`, `${sign} ${word}`);
}
function nodeCard(node) {
  const version = versions(node)[0];
  const fact = version
    ? make("span", "fact name model", `◆ ${version.name} v${version.version}`)
    : make("span", "fact", `${node.kind} · ${size(node.nbytes)}`);
  const card = make("button", "card", heading(node, stepOf(node)), whereabouts(node), make("span", "foot", fact, mark(node)));
  card.classList.toggle("root", node.checkpoint_digest === data.root);
  card.classList.toggle("gone", isGone(node));
  card.title = uriOf(node);
  return tinted(card, node.format);
}
function stackCard(members) {
  const steps = members.map((node) => node.step).filter((step) => step !== null);
  const range = steps.length ? `steps ${steps[0].toLocaleString("en")} – ${steps.at(-1).toLocaleString("en")}` : members[0].kind;
  const graded = (grade) => members.filter((node) => node.verified && gradeOf(node.verified)[0] === grade).length;
  const bad = graded("bad");
  const good = graded("good");
  const state = bad ? make("span", "mark bad", `✗ ${bad}`) : good ? make("span", "mark good", `✓ ${good}`) : null;
  const total = members.reduce((sum, node) => sum + node.nbytes, 0);
  const card = make("button", "card stack", heading(members[0], `× ${members.length}`),
    make("span", "where", make("span", "name", range)),
    make("span", "foot", make("span", "fact", `open to see each · ${size(total)}`), state));
  card.title = `Open ${members.length} checkpoints`;
  return tinted(card, members[0].format);
}

// --- the graph -------------------------------------------------------------------------------------------------
const state = { selected: null, scale: 1, drawn: null, cards: new Map(), more: new Map(), found: null };
function draw() {
  const ids = [...new Set(data.nodes.map((node) => cardOf(node.checkpoint_digest)))];
  const byEnds = new Map();
  for (const edge of data.edges) {
    const ends = { source: cardOf(edge.source), target: cardOf(edge.target) };
    const key = `${ends.source}\n${ends.target}`;
    if (!byEnds.has(key)) byEnds.set(key, { ...ends, lossy: false, members: [] });
    byEnds.get(key).lossy ||= !edge.lossless;
    byEnds.get(key).members.push(edge);
  }
  state.more = moreCards();
  const more = [...state.more.values()].map(({ ends }) => ({ ...ends, lossy: false, members: [] }));
  state.drawn = layout([...ids, ...state.more.keys()], [...byEnds.values(), ...more]);
  state.cards.clear();
  cards.replaceChildren();
  for (const id of state.drawn.layers.flat()) {
    const card = nodes.has(id) ? nodeCard(nodes.get(id)) : state.more.has(id) ? moreCard(state.more.get(id)) : stackCard(stacks.get(id));
    const { x, y } = state.drawn.at.get(id);
    card.type = "button";
    card.dataset.id = id;
    card.style.left = `${x}px`;
    card.style.top = `${y - CARD.height / 2}px`;
    state.cards.set(id, card);
    cards.append(card);
  }
  drawLines();
  drawOverview();
  zoom(state.scale);
  paint();
}
function drawLines() {
  lines.replaceChildren();
  for (const line of state.drawn.lines) {
    const start = state.drawn.at.get(line.edge.source), end = state.drawn.at.get(line.edge.target);
    const group = shape("g", { class: `${line.edge.lossy ? "lossy" : ""} ${line.back ? "back" : ""}` });
    const tip = line.back ? { x: end.x + CARD.width / 2, y: end.y + CARD.height / 2 } : { x: end.x, y: end.y };
    group.append(
      shape("path", { class: "line", d: line.back ? under(start, tip) : along(start, line.bends, tip) }),
      shape("path", { class: "tip", d: line.back ? `M${tip.x - 5},${tip.y + 9} h10 l-5,-9 z` : `M${tip.x - 9},${tip.y - 5} v10 l9,-5 z` }),
    );
    line.group = group;
    lines.append(group);
  }
}
function along(start, bends, tip) {
  let path = `M${start.x + CARD.width},${start.y}`;
  let from = { x: start.x + CARD.width, y: start.y };
  const curve = (to) => {
    const half = (from.x + to.x) / 2;
    path += ` C${half},${from.y} ${half},${to.y} ${to.x},${to.y}`;
    from = to;
  };
  for (const bend of bends) {
    curve({ x: bend.x, y: bend.y });
    from = { x: bend.x + CARD.width, y: bend.y };
    path += ` H${from.x}`;
  }
  curve({ x: tip.x - 6, y: tip.y });
  return path;
}
function under(start, tip) {
  const x = start.x + CARD.width / 2, y = start.y + CARD.height / 2;
  const low = Math.max(y, tip.y) + 62;
  return `M${x},${y} C${x},${low} ${tip.x},${low} ${tip.x},${tip.y + 6}`;
}

// --- zoom and overview -----------------------------------------------------------------------------------------
function zoom(scale, centre) {
  const before = state.scale;
  state.scale = Math.min(1.6, Math.max(0.25, scale));
  const { width, height } = state.drawn;
  const [x, y] = [Math.max(0, (view.clientWidth - width * state.scale) / 2), Math.max(0, (view.clientHeight - height * state.scale) / 2)];
  canvas.style.width = `${width * state.scale}px`;
  canvas.style.height = `${height * state.scale}px`;
  for (const layer of [cards, lines]) layer.style.transform = `translate(${x}px, ${y}px) scale(${state.scale})`;
  canvas.classList.toggle("far", state.scale < 0.5);
  if (centre) {
    view.scrollLeft = (view.scrollLeft + centre.x) * (state.scale / before) - centre.x;
    view.scrollTop = (view.scrollTop + centre.y) * (state.scale / before) - centre.y;
  }
  frame();
}
function fit(least) {
  const whole = Math.min((view.clientWidth - 20) / state.drawn.width, (view.clientHeight - 20) / state.drawn.height, 1);
  zoom(Math.max(whole, least));
  centre(cardOf(state.selected && nodes.has(state.selected) ? state.selected : data.root));
}
const middle = () => ({ x: view.clientWidth / 2, y: view.clientHeight / 2 });
function centre(id) {
  const { x, y } = state.drawn.at.get(id);
  view.scrollLeft = (x + CARD.width / 2) * state.scale - view.clientWidth / 2;
  view.scrollTop = y * state.scale - view.clientHeight / 2;
}
function drawOverview() {
  const { width, height, at } = state.drawn;
  const overview = get("overview");
  overview.setAttribute("viewBox", `0 0 ${width} ${height}`);
  overview.replaceChildren(...[...state.cards.keys()].map((id) => {
    const place = at.get(id);
    const box = shape("rect", { x: place.x, y: place.y - CARD.height / 2, width: CARD.width, height: CARD.height });
    box.style.fill = tints.get((nodes.get(id) ?? stacks.get(id)?.[0])?.format) ?? "var(--line)";
    return box;
  }), shape("rect", { class: "frame", "vector-effect": "non-scaling-stroke" }));
}
function fits() {
  const { width, height } = state.drawn;
  return width * state.scale <= view.clientWidth + 2 && height * state.scale <= view.clientHeight + 2;
}
function frame() {
  get("overview").toggleAttribute("hidden", fits());
  const box = { x: view.scrollLeft, y: view.scrollTop, width: view.clientWidth, height: view.clientHeight };
  for (const [name, value] of Object.entries(box)) get("overview").querySelector(".frame").setAttribute(name, value / state.scale);
}
