// --- details, list, search and keys ------------------------------------------------------------------------------
function paint() {
  const chosen = state.selected && nodes.has(state.selected) ? state.selected : null;
  const all = chosen ? new Set([...reached(chosen, parents, "source"), ...reached(chosen, children, "target")]) : new Set();
  const way = all.size < data.edges.length ? all : new Set(); // to stress everything is to stress nothing
  const ends = new Set([...way].flatMap((edge) => [cardOf(edge.source), cardOf(edge.target)]));
  if (chosen) ends.add(cardOf(chosen));
  canvas.classList.toggle("searching", state.found !== null);
  canvas.classList.toggle("selecting", way.size > 0 && state.found === null);
  for (const [id, card] of state.cards) {
    const members = nodes.has(id) ? [id] : (stacks.get(id) ?? []).map((node) => node.checkpoint_digest);
    const hits = state.found ? members.filter((member) => state.found.has(member)).length : 0;
    card.classList.toggle("hit", hits > 0);
    card.classList.toggle("dim", state.found !== null && !hits);
    card.classList.toggle("off", !ends.has(id));
    card.setAttribute("aria-current", String(id === (chosen ? cardOf(chosen) : state.selected)));
    card.tabIndex = id === cardOf(chosen ?? data.root) ? 0 : -1;
  }
  for (const line of state.drawn.lines) {
    const on = line.edge.members.some((edge) => way.has(edge));
    line.group.classList.toggle("on", on);
    line.group.classList.toggle("off", !on);
    line.group.classList.toggle("dim", state.found !== null);
  }
  for (const row of list.querySelectorAll(".row")) row.setAttribute("aria-current", String(row.dataset.id === chosen));
}

// Scroll to a row of the list without `scrollIntoView`, which in Chromium moves the place from which Tab goes on.
function show(row) {
  const outside = (top, bottom) => {
    const box = row.getBoundingClientRect();
    return box.top < top ? box.top - top : Math.max(0, box.bottom - bottom);
  };
  const { top, bottom } = list.getBoundingClientRect();
  list.scrollTop += outside(top, bottom);
  scrollBy(0, outside(0, document.documentElement.clientHeight));
}
function select(digest, { move = true, focus = false } = {}) {
  state.selected = digest;
  if (move && !state.cards.has(digest)) {
    opened.add(stackOf.get(digest));
    draw();
  }
  paint();
  tell(nodes.get(digest));
  if (move) centre(cardOf(digest));
  if (focus) {
    view.scrollIntoView({ block: "nearest" }); // on a phone the graph is below the list
    state.cards.get(cardOf(digest)).focus({ preventScroll: true }); // last: Tab goes on from here
  }
  const row = list.querySelector('li:not([hidden]) > .row[aria-current="true"]');
  if (row) show(row);
  history.replaceState(null, "", `#${digest}`);
}
// A link to a checkpoint: `#` and its digest.
function follow() {
  const digest = location.hash.slice(1);
  const listed = nodes.has(digest) ? null : hidden.find((node) => digest.startsWith(node.checkpoint_digest));
  if (nodes.has(digest)) select(digest, { focus: true });
  else if (listed) tellHidden(listed);
  return nodes.has(digest) || Boolean(listed);
}
function open(stack) {
  if (state.more.has(stack)) {
    search.focus();
    return;
  }
  opened.add(stack);
  draw();
  select(stacks.get(stack)[0].checkpoint_digest);
}

function rows(pairs) {
  const table = make("dl");
  for (const [name, ...values] of pairs) {
    if (values.length && values[0] !== null) table.append(make("dt", "", name), ...values.map((value) => make("dd", "", value)));
  }
  return table;
}
function place(row) {
  const uri = make("code", "name", row.uri);
  const when = row.gone ? `deleted ${typeof row.gone === "string" ? moment(row.gone) : ""}` : `seen ${moment(row.seen)}`;
  return make("span", "", row.gone ? make("s", "", uri) : uri, make("span", "small", when));
}
function registration(row) {
  const what = row.version === null ? `${row.name}: ${row.state}` : `${row.name} version ${row.version}`;
  return make("span", "", make("span", "name", what), make("span", "small", `in ${row.registry}`));
}
function verification(outcome) {
  const [grade, sign] = gradeOf(outcome);
  const words = `${sign} ${outcome.verdict} at level ${outcome.level}`;
  return make("span", "", make("span", grade, words), make("span", "small", moment(outcome.time)));
}
function twins(node) {
  const same = data.nodes.filter((other) => other.weights_digest === node.weights_digest).length - 1;
  const here = total > data.nodes.length ? "shown here" : "here";
  const words = same ? `the same values as ${count(same, "other checkpoint")} ${here}` : `no other checkpoint ${here} holds these values`;
  return make("span", "", make("code", "", node.weights_digest), make("span", "small", words));
}
function conversions(title, edges, end, more) {
  if (!edges.length && !more) return [];
  const links = edges.map((edge) => {
    const exact = edge.lossless ? make("span", "", "lossless") : make("span", "warn", "lossy");
    const origin = edge.statement === null ? "its sidecar" : `statement ${edge.statement}`;
    const how = make("span", "how", exact, ` · ${moment(edge.time)} · plan ${short(edge.plan_digest)} · ${origin}`);
    const other = nodes.get(edge[end]);
    const link = make("button", "link", heading(other, stepOf(other)), whereabouts(other), how);
    link.type = "button";
    link.addEventListener("click", () => select(edge[end]));
    return link;
  });
  const amount = edges.length + more;
  const rest = more ? [make("p", "small", `${number(edges.length)} shown here, and ${number(more)} more`)] : [];
  return [make("h3", "", amount > 1 ? `${title} (${number(amount)})` : title), ...rest, ...links];
}
function tell(node) {
  const version = node.format_version ? ` (${node.format_version})` : "";
  const first = node.checkpoint_digest === data.root ? "The root of this page. " : "";
  const stack = stackOf.get(node.checkpoint_digest);
  const rest = (name) => (node.more?.[name] ? [`and ${number(node.more[name])} more`] : []);
  const refold = stack && get("fold").checked ? make("button", "plain", `Fold these ${stacks.get(stack).length} again`) : null;
  refold?.addEventListener("click", () => {
    opened.delete(stack);
    state.selected = null;
    draw();
    centre(stack);
  });
  details.replaceChildren(...[
    make("h2", "", `${node.format}${version}`),
    make("p", "lead name", first, tail(uriOf(node)).parent, tail(uriOf(node)).name),
    refold,
    rows([
      ["Step", node.step === null ? null : node.step.toLocaleString("en")],
      ["Contents", `${node.kind}: ${count(node.tensors, "tensor")}, ${large(node.parameters)} parameters`],
      ["Size", `${size(node.nbytes)} (${count(node.nbytes, "byte")})`],
      ["Verified", node.verified ? verification(node.verified) : "never"],
      ["Registered", ...(node.registrations.length ? node.registrations.map(registration) : ["no"]), ...rest("registrations")],
      [node.places.length > 1 ? "Places" : "Place", ...(node.places.length ? node.places.map(place) : ["unknown"]), ...rest("places")],
      ["Checkpoint", make("code", "", node.checkpoint_digest)],
      ["Weights", twins(node)],
    ]),
    ...conversions("Converted from", parents.get(node.checkpoint_digest), "source", moreOf(node.checkpoint_digest)[0]),
    ...conversions("Converted to", children.get(node.checkpoint_digest), "target", moreOf(node.checkpoint_digest)[1]),
  ].filter(Boolean));
  details.scrollTop = 0;
}

function words(node) {
  return [node.format, node.format_version, node.kind, stepOf(node), node.step,
    ...node.places.map((row) => row.uri), isGone(node) ? "deleted" : "", node.verified?.verdict, node.verified?.level,
    ...node.registrations.map((row) => `${row.name} v${row.version} version ${row.version} ${row.registry}`)].join("\n").toLowerCase();
}
const texts = new Map(data.nodes.map((node) => [node.checkpoint_digest, words(node)]));
// A number in a digest is no match for a step: digests count by how they begin, from 8 digits on.
function matches(node, word) {
  const digests = word.length < 8 ? [] : [node.checkpoint_digest, node.weights_digest];
  return texts.get(node.checkpoint_digest).includes(word) || digests.some((digest) => digest.startsWith(word) || digits(digest).startsWith(word));
}
function find() {
  const terms = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = data.nodes.filter((node) => terms.every((word) => matches(node, word)));
  state.found = terms.length ? new Set(hits.map((node) => node.checkpoint_digest)) : null;
  const others = terms.length ? hidden.filter((node) => terms.every((word) => isHidden(node, word))) : null;
  const found = others ? `${number(hits.length + others.length)} of ` : "";
  get("count").textContent = `${found}${count(total, "checkpoint")}${unlisted}`;
  for (const row of list.querySelectorAll(".row")) row.parentElement.hidden = state.found !== null && !state.found.has(row.dataset.id);
  listHidden(others);
  paint();
}
function fillList() {
  const level = new Map(layout([...nodes.keys()], data.edges.map(({ source, target }) => ({ source, target }))).layers
    .flatMap((layer, number) => layer.map((id) => [id, number])));
  const ordered = [...data.nodes].sort((one, two) => level.get(one.checkpoint_digest) - level.get(two.checkpoint_digest)
    || one.format.localeCompare(two.format) || (one.step ?? 0) - (two.step ?? 0));
  list.replaceChildren(...ordered.map((node) => {
    const row = make("button", "row", heading(node, stepOf(node)), whereabouts(node));
    row.type = "button";
    row.dataset.id = node.checkpoint_digest;
    row.title = uriOf(node);
    row.addEventListener("click", () => select(node.checkpoint_digest));
    return make("li", "", row);
  }));
}
function fillLegend() {
  const chips = [...tints.keys()].map((format) => {
    const chip = tinted(make("button", "name", tinted(make("span", "swatch"), format), make("span", "label", format)), format);
    chip.type = "button";
    chip.title = "Search for this format";
    chip.addEventListener("click", () => {
      search.value = search.value === format ? "" : format;
      find();
    });
    return chip;
  });
  const lossy = data.edges.some((edge) => !edge.lossless) ? make("span", "warn", "╌ lossy") : null;
  get("legend").replaceChildren(...chips, ...(lossy ? [lossy] : []));
}
function summarise() {
  const { edges, lossy, failed, versions: registered, models } = data.totals;
  const exactness = edges === 0 ? null : lossy ? `${number(lossy)} lossy` : edges > 1 ? "all lossless" : "lossless";
  const parts = [count(total, "checkpoint"), count(edges, "conversion"), exactness,
    registered ? (registered < 3 ? `registered as ${models.join(", ")}` : count(registered, "model version")) : null,
    total > data.nodes.length ? `only the ${number(data.nodes.length)} nearest are drawn; search lists the others` : null];
  get("summary").replaceChildren(parts.filter(Boolean).join(" · "), ...(failed ? [make("span", "bad", ` · ${number(failed)} failed verification`)] : []));
}

function step(key) {
  const id = state.cards.has(state.selected) ? state.selected : cardOf(state.selected ?? data.root);
  const drawn = state.drawn;
  const layer = drawn.layers.find((row) => row.includes(id));
  const offset = { ArrowUp: -1, ArrowDown: 1 }[key];
  const tied = (own, other) => drawn.lines.find((line) => !line.back && line.edge[own] === id)?.edge[other];
  const next = offset ? layer[layer.indexOf(id) + offset] : key === "ArrowLeft" ? tied("target", "source") : tied("source", "target");
  if (!next) return;
  if (nodes.has(next)) select(next);
  else { // a stack is only stood upon; Enter opens it
    state.selected = next;
    paint();
    centre(next);
  }
  state.cards.get(next).focus({ preventScroll: true });
}
function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target === search;
  const inList = list.contains(event.target);
  if (event.key === "Escape") {
    search.value = "";
    find();
  } else if (typing) {
    const first = [...list.querySelectorAll("li:not([hidden]) .row")][0];
    if (event.key === "Enter" && first && state.found) first.click();
    if (event.key === "ArrowDown" && first) first.focus();
    if (event.key !== "ArrowDown") return;
  } else if (event.key === "/") search.focus();
  else if (event.key === "+" || event.key === "=") zoom(state.scale * 1.25, middle());
  else if (event.key === "-") zoom(state.scale / 1.25, middle());
  else if (event.key === "0") fit(0);
  else if (inList && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    const shown = [...list.querySelectorAll("li:not([hidden]) .row")];
    const next = shown.indexOf(event.target) + (event.key === "ArrowDown" ? 1 : -1);
    (shown[next] ?? (next < 0 ? search : event.target)).focus();
  } else if (event.key.startsWith("Arrow") && !details.contains(event.target)) step(event.key);
  else return;
  event.preventDefault();
}

function listen() {
  document.addEventListener("keydown", pressed);
  search.addEventListener("input", find);
  view.addEventListener("scroll", frame);
  window.addEventListener("hashchange", follow);
  window.addEventListener("resize", () => zoom(state.scale));
  get("smaller").addEventListener("click", () => zoom(state.scale / 1.25, middle()));
  get("larger").addEventListener("click", () => zoom(state.scale * 1.25, middle()));
  get("fit").addEventListener("click", () => fit(0));
  get("fold").addEventListener("change", () => { opened.clear(); draw(); fit(0.75); });
  get("theme").addEventListener("click", () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
  cards.addEventListener("click", (event) => {
    const id = event.target.closest(".card")?.dataset.id;
    if (id) nodes.has(id) ? select(id, { move: false }) : open(id);
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = view.getBoundingClientRect();
    zoom(state.scale * 1.002 ** -event.deltaY, { x: event.clientX - box.left, y: event.clientY - box.top });
  }, { passive: false });
  view.addEventListener("pointerdown", (event) => {
    if (event.button || event.target.closest(".card")) return;
    view.setPointerCapture(event.pointerId);
    view.classList.add("dragging");
  });
  view.addEventListener("pointermove", (event) => {
    if (view.classList.contains("dragging")) view.scrollBy(-event.movementX, -event.movementY);
  });
  for (const end of ["pointerup", "pointercancel"]) view.addEventListener(end, () => view.classList.remove("dragging"));
  get("overview").addEventListener("pointerdown", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(get("overview").getScreenCTM().inverse());
    view.scrollLeft = point.x * state.scale - view.clientWidth / 2;
    view.scrollTop = point.y * state.scale - view.clientHeight / 2;
  });
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
sortIntoStacks();
get("folding").hidden = !stacks.size;
get("fold").checked = data.nodes.length >= FOLD_WHEN && stacks.size > 0;
get("folding").style.display = stacks.size ? "" : "none";
summarise();
fillList();
fillLegend();
draw();
find();
fit(view.clientWidth < 600 ? 1 : 0.75); // on a phone, names are to be read
listen();
if (!follow()) select(data.root);
