// Tree of a conversation's turns. Each turn has the id of its `parent`, the previous turn; a first
// turn has null. Turns with the same parent are versions of one another.

/** Return the turns from a first turn to the one with the id `leaf`. */
export function pathTo(turns, leaf) {
  const byId = new Map(turns.map((turn) => [turn.id, turn]));
  const path = [];
  // Visit each turn once: an imported tree may have cycles.
  for (let turn = byId.get(leaf); turn; turn = byId.get(turn.parent)) {
    path.unshift(turn);
    byId.delete(turn.id);
  }
  return path;
}

/** Return the versions of a turn, including the turn, oldest first. */
export function versionsOf(turns, { parent }) {
  return turns.filter((turn) => turn.parent === parent);
}

/** Return the id of the last turn on the newest path after `turn`. */
export function newestLeaf(turns, turn) {
  let leaf = turn;
  const seen = new Set();
  while (leaf && !seen.has(leaf.id)) {
    seen.add(leaf.id);
    const { id } = leaf;
    const next = turns.findLast(({ parent }) => parent === id);
    if (!next) break;
    leaf = next;
  }
  return leaf?.id ?? null;
}

/** Chain turns that were saved by a page without versions. */
export function withParents(turns) {
  return turns.map((turn, place) =>
    turn.parent === undefined ? { ...turn, parent: turns[place - 1]?.id ?? null } : turn,
  );
}

/** Merge two trees. Of a turn in both, the last written one is used. */
export function merged(ours, theirs) {
  const byId = new Map(ours.map((turn) => [turn.id, turn]));
  for (const turn of theirs) {
    const own = byId.get(turn.id);
    if (!own || (turn.savedMs ?? 0) > (own.savedMs ?? 0)) byId.set(turn.id, turn);
  }
  return [...byId.values()].sort((a, b) => (a.askedMs ?? 0) - (b.askedMs ?? 0));
}
