// Reads an EngineView's list of marks piece by piece.

/** Remembers how many marks of which server run one reader has seen. */
export class MarkCursor {
  #session = "";
  #numSeen = 0;

  /** Marks that came since the last call, oldest first; those that the view has dropped meanwhile are missing. */
  take({ session, marks, marksTotal }) {
    if (session !== this.#session) this.#numSeen = 0;
    this.#session = session;
    const numFresh = Math.min(marksTotal - this.#numSeen, marks.length);
    this.#numSeen = marksTotal;
    return numFresh > 0 ? marks.slice(-numFresh) : [];
  }
}
