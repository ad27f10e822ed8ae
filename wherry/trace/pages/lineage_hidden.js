// Checkpoints that are only listed: a large lineage is not shown whole, but search finds every checkpoint that the page lists.
const LISTED = 200; // rows of the list that are made of them at once
const hidden = unpack(data.hidden);
const total = data.totals.nodes;
const number = (value) => value.toLocaleString("en");
const unlisted = data.hidden.unlisted ? `; search cannot find ${number(data.hidden.unlisted)} of them` : "";
const bare = (digest) => digest.split(":").at(-1);

// Each name begins with some characters of the name before it; counted as Python counts them.
function unpack({ formats, rows }) {
  let letters = [];
  return rows.map(([digest, shared, rest, step, format, words]) => {
    letters = [...letters.slice(0, shared), ...rest];
    const node = { checkpoint_digest: digest, format: formats[format] ?? "unknown format", step, places: [{ uri: letters.join("") }] };
    return { ...node, text: [node.format, stepOf(node), step, uriOf(node), words].join("\n").toLowerCase() };
  });
}
function isHidden(node, word) {
  const digest = bare(node.checkpoint_digest), start = bare(word);
  return node.text.includes(word) || (start.length >= 8 && (digest.startsWith(start) || start.startsWith(digest)));
}
const moreOf = (digest) => data.more[digest] ?? [0, 0];

// The cards and lines that stand for neighbours that are not shown.
function moreCards() {
  const found = new Map();
  for (const [digest, sides] of Object.entries(data.more)) {
    sides.forEach((amount, side) => {
      if (!amount) return;
      const card = cardOf(digest), id = `more ${side} ${card}`;
      if (!found.has(id)) found.set(id, { amount: 0, ends: side ? { source: card, target: id } : { source: id, target: card } });
      found.get(id).amount += amount;
    });
  }
  return found;
}
function moreCard({ amount }) {
  const card = make("button", "card more", make("span", "top", make("span", "format", `and ${number(amount)} more`)),
    make("span", "where", make("span", "name", "found by search")));
  card.title = "Search for them";
  return card;
}

function listHidden(hits) {
  for (const item of list.querySelectorAll(".listed")) item.remove();
  const found = hits ?? [];
  const rest = (hits ? found.length : total - data.nodes.length) - Math.min(found.length, LISTED);
  list.append(...found.slice(0, LISTED).map((node) => {
    const row = make("button", "row", heading(node, stepOf(node)), whereabouts(node));
    row.type = "button";
    row.title = uriOf(node);
    row.addEventListener("click", () => tellHidden(node));
    return make("li", "listed", row);
  }));
  if (rest) list.append(make("li", "listed small", `and ${number(rest)} more`));
}
function tellHidden(node) {
  const { parent, name } = tail(uriOf(node));
  details.replaceChildren(
    make("h2", "", node.format), make("p", "lead name", parent, name),
    rows([
      ["Step", node.step === null ? null : number(node.step)],
      ["Place", make("code", "name", uriOf(node) || "unknown")],
      ["Checkpoint", make("code", "", node.checkpoint_digest)],
      ["Details", make("span", "", "not in this page; run ", make("code", "", `wherry lineage show ${node.checkpoint_digest}`))],
    ]),
  );
  details.scrollTop = 0;
}
