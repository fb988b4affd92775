// The live page: the engine view over the socket, and how far it keeps up.

import { EnginePage, exposePage } from "./engine_page.js";
import { formatCount } from "./format.js";
import { bindPolicies } from "./policies.js";
import { describeView, tokenRates } from "./status_bar.js";
import { EngineStream } from "./stream.js";

const IDLE_REFRESH_MS = 5000;
const MAX_FPS = 60;

const byId = (id) => document.getElementById(id);

let refreshedAt = -Infinity;
let stepsPerFrame = 0;

/** The page limits how often the server is really asked. */
function refreshPanels() {
  refreshedAt = performance.now();
  document.body.dispatchEvent(new CustomEvent("engine:tick"));
}

function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function writePace({ view, paintedStep, loop, framesWithSteps, stepsInFrames }) {
  if (framesWithSteps > 0) stepsPerFrame = stepsInFrames / framesWithSteps;
  if (view.numBlocks > 0) {
    const behind = Math.max(0, Number(byId("engine-step").value) - paintedStep); // the server says once a second where it is
    const limitText = loop.fps < MAX_FPS ? `at most ${loop.fps} frames/s` : "";
    const words = describeView({ stepsPerFrame, limitText, numWatching: Number(byId("num-watching").value) }, view);
    setText("stat-lag", `${formatCount(behind)} behind`);
    setText("stat-frames", words.pace);
    setText("stat-lost", words.lost);
  }
  return tokenRates(view.steps, view.serverMs);
}

const page = new EnginePage({
  makeSource: (view, listeners) => new EngineStream(view, listeners),
  refreshPanels,
  writePace,
  everySecond({ source }) {
    // Nothing comes from an idle engine, but other pages come and go.
    const isQuiet = performance.now() - refreshedAt >= IDLE_REFRESH_MS;
    if (isQuiet && source.status.connected && !source.hidden) refreshPanels();
  },
});
page.start();
bindPolicies({ announce: (text) => page.announcer.say(text) });
exposePage(page);
