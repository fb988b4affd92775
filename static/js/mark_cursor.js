// Reads an EngineView's list of marks piece by piece.

/** Remembers how many marks of which epoch one reader has seen. */
export class MarkCursor {
  #epoch = 0;
  #numSeen = 0;

  /** Marks that came since the last call, oldest first; those that the view has dropped meanwhile are missing. */
  take({ epoch, marks, marksTotal }) {
    if (epoch !== this.#epoch) this.#numSeen = 0;
    this.#epoch = epoch;
    const numFresh = Math.min(marksTotal - this.#numSeen, marks.length);
    this.#numSeen = marksTotal;
    return numFresh > 0 ? marks.slice(-numFresh) : [];
  }
}
