// Layers from left (sources) to right (results): break cycles, rank, order by neighbours, then align with them.
const CARD = { width: 236, height: 76, across: 90, between: 22, margin: 40, bend: 14 };

function layout(ids, edges) {
  const { order, back } = walk(ids, edges);
  const forward = edges.filter((edge) => !back.has(edge));
  const rank = ranks(order, forward);
  const layers = [];
  const put = (id, level) => (layers[level] ??= []).push(id);
  for (const id of order) put(id, rank.get(id));
  const bends = new Map(); // edge → the points between its ends, one a layer
  const ties = [];
  for (const edge of forward) {
    let last = edge.source;
    const middle = [];
    for (let level = rank.get(edge.source) + 1; level < rank.get(edge.target); level++) {
      const bend = Symbol("bend");
      put(bend, level);
      ties.push([last, bend]);
      middle.push(bend);
      last = bend;
    }
    ties.push([last, edge.target]);
    bends.set(edge, middle);
  }
  const near = neighbours(layers, ties);
  arrange(layers, near);
  const y = align(layers, near);
  const at = new Map();
  layers.forEach((layer, level) => {
    for (const id of layer) at.set(id, { x: CARD.margin + level * (CARD.width + CARD.across), y: y.get(id) });
  });
  const lines = edges.map((edge) => ({ edge, back: back.has(edge), bends: (bends.get(edge) ?? []).map((id) => at.get(id)) }));
  const lowest = Math.max(...[...at.values()].map((place) => place.y));
  const turning = back.size ? 60 : 0;
  return {
    at, lines, layers: layers.map((layer) => layer.filter((id) => typeof id === "string")),
    width: layers.length * (CARD.width + CARD.across) - CARD.across + 2 * CARD.margin,
    height: lowest + CARD.height / 2 + CARD.margin + turning,
  };
}

// Depth first, without recursion: what is met twice on one way closes a cycle. Reverse postorder is topological.
function walk(ids, edges) {
  const out = new Map(ids.map((id) => [id, []]));
  const entered = new Set(edges.map((edge) => edge.target));
  for (const edge of edges) out.get(edge.source).push(edge);
  const state = new Map();
  const back = new Set();
  const order = [];
  for (const start of [...ids.filter((id) => !entered.has(id)), ...ids]) {
    if (state.has(start)) continue;
    const way = [[start, 0]];
    state.set(start, "open");
    while (way.length) {
      const top = way[way.length - 1];
      const edge = out.get(top[0])[top[1]++];
      if (!edge) {
        state.set(top[0], "done");
        order.push(top[0]);
        way.pop();
      } else if (state.get(edge.target) === "open") {
        back.add(edge);
      } else if (!state.has(edge.target)) {
        state.set(edge.target, "open");
        way.push([edge.target, 0]);
      }
    }
  }
  return { order: order.reverse(), back };
}

function ranks(order, edges) {
  const rank = new Map(order.map((id) => [id, 0]));
  const out = new Map(order.map((id) => [id, []]));
  const entered = new Set();
  for (const edge of edges) {
    out.get(edge.source).push(edge.target);
    entered.add(edge.target);
  }
  for (const id of order) for (const next of out.get(id)) rank.set(next, Math.max(rank.get(next), rank.get(id) + 1));
  for (const id of order) { // a source stands just before what it became
    if (!entered.has(id) && out.get(id).length) rank.set(id, Math.min(...out.get(id).map((next) => rank.get(next))) - 1);
  }
  return rank;
}

function neighbours(layers, ties) {
  const near = new Map(layers.flat().map((id) => [id, { before: [], after: [] }]));
  for (const [left, right] of ties) {
    near.get(left).after.push(right);
    near.get(right).before.push(left);
  }
  return near;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function arrange(layers, near) {
  for (let sweep = 0; sweep < 8; sweep++) {
    const side = sweep % 2 ? "after" : "before";
    const index = new Map(layers.flatMap((row) => row.map((id, place) => [id, place])));
    for (const layer of sweep % 2 ? [...layers].reverse() : layers) {
      const weight = new Map(layer.map((id) => {
        const others = near.get(id)[side];
        return [id, others.length ? mean(others.map((other) => index.get(other))) : index.get(id)];
      }));
      layer.sort((one, two) => weight.get(one) - weight.get(two));
      layer.forEach((id, place) => index.set(id, place));
    }
  }
}

function align(layers, near) {
  const half = (id) => (typeof id === "string" ? CARD.height / 2 + CARD.between / 2 : CARD.bend);
  const y = new Map();
  for (const layer of layers) spread(layer, layer.map(() => 0), half, y);
  for (let sweep = 0; sweep < 12; sweep++) {
    for (const layer of sweep % 2 ? [...layers].reverse() : layers) {
      const ideal = layer.map((id) => {
        const { before, after } = near.get(id);
        const side = sweep > 7 ? [...before, ...after] : sweep % 2 ? after : before;
        return side.length ? mean(side.map((other) => y.get(other))) : y.get(id);
      });
      spread(layer, ideal, half, y);
    }
  }
  const shift = CARD.margin + CARD.height / 2 - Math.min(...[...y].filter(([id]) => typeof id === "string").map(([, value]) => value));
  for (const [id, value] of y) y.set(id, value + shift);
  return y;
}

// The positions nearest to the ideal ones that keep order and distance: pool what would overlap.
function spread(layer, ideal, half, y) {
  let offset = 0;
  const pools = [];
  layer.forEach((id, number) => {
    offset += number ? half(layer[number - 1]) + half(id) : 0;
    let pool = { sum: ideal[number] - offset, members: [[id, offset]] };
    while (pools.length && pools.at(-1).sum / pools.at(-1).members.length > pool.sum / pool.members.length) {
      const above = pools.pop();
      pool = { sum: above.sum + pool.sum, members: [...above.members, ...pool.members] };
    }
    pools.push(pool);
  });
  for (const pool of pools) {
    for (const [id, distance] of pool.members) y.set(id, pool.sum / pool.members.length + distance);
  }
}
