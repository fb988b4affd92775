// Seeks through a recorded session with static/js/replay_stream.js.
// Usage: node replay_seeks.mjs FOLDER; FOLDER holds chunk-N.bin and plan.json {session, range, seeks: [[step, direction]…]}.
// Prints one JSON line a seek: {wanted, step, cells, host, batch, firstRow, lastRow, rows, gaps}.

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { EngineView } from "../../static/js/reducer.js";
import { ReplayStream } from "../../static/js/replay_stream.js";
import { pageStub, settled } from "./replay_page.mjs";

const folder = process.argv[2];
const { session, range, seeks } = JSON.parse(readFileSync(join(folder, "plan.json"), "utf8"));

async function fetchChunk(url) {
  const first = url.split("/").pop();
  return new Response(readFileSync(join(folder, `chunk-${first}.bin`)), { headers: { "cache-control": "immutable" } });
}

const view = new EngineView({ clock: () => 0 });
const page = pageStub(fetchChunk);
const stream = new ReplayStream(view, { session, range, env: page.env });
stream.start();
await settled(stream);
for (const [step, direction] of seeks) {
  stream.seek(step, { direction });
  await settled(stream);
  const { steps } = view;
  const rows = [...Array(steps.length).keys()].map((i) => steps.get("step", i));
  console.log(JSON.stringify({
    wanted: stream.wanted, step: view.step, cells: [...view.cells], host: view.host, batch: view.batch, rows, gaps: view.gaps,
    problem: stream.status.reason,
  }));
}
