// Replays recorded messages through static/js/reducer.js.
// Usage: node replay_frames.mjs MESSAGES; MESSAGES is a file of (u32 length, message)…
// Prints one JSON line a message: {step, cells, rows, gaps, host, batch, marks, changed}.

import { readFileSync } from "node:fs";

import { EngineView } from "../../static/js/reducer.js";

const file = readFileSync(process.argv[2]);
const view = new EngineView({ clock: () => 0 });
const lines = [];
for (let at = 0; at < file.length; ) {
  const length = file.readUInt32LE(at);
  // A copy of its own, as a browser gives it.
  const message = new Uint8Array(file.subarray(at + 4, at + 4 + length)).buffer;
  const { lastStep, changed, hello } = await view.apply(message);
  const rows = view.steps.length;
  lines.push(JSON.stringify({
    step: lastStep,
    status: view.status,
    cells: [...view.cells],
    changed: changed === null ? null : [...changed],
    hello,
    rows,
    firstRow: rows ? view.steps.get("step", 0) : -1,
    lastRow: rows ? view.steps.row(rows - 1) : null,
    gaps: view.gaps,
    host: view.host,
    batch: view.batch,
    marks: view.marksTotal,
    marksLost: view.marksLost,
    rowsLost: view.rowsLost,
  }));
  at += 4 + length;
}
process.stdout.write(`${lines.join("\n")}\n`);
