// Reads an EngineView's list of marks piece by piece.

/** Remembers how many marks one reader has seen. */
export class MarkCursor {
  #numSeen = 0;

  /** Marks that came since the last call, oldest first; those that the view has dropped meanwhile are missing. */
  take({ marks, marksTotal }) {
    if (marksTotal < this.#numSeen) this.#numSeen = 0; // another server run
    const numFresh = Math.min(marksTotal - this.#numSeen, marks.length);
    this.#numSeen = marksTotal;
    return numFresh > 0 ? marks.slice(-numFresh) : [];
  }
}
