// Stand-ins for the browser that a ReplayStream runs in.

/** `env` for a ReplayStream; `frame(ms)` lets so much time pass and runs what waits for the next frame. */
export function pageStub(fetch) {
  const timers = [];
  let waiting = [];
  let now = 0;
  const env = {
    fetch,
    document: { visibilityState: "visible" },
    requestAnimationFrame: (callback) => waiting.push(callback),
    setTimeout: (callback, delay) => timers.push({ callback, delay }),
    clearTimeout: (id) => { if (timers[id - 1]) timers[id - 1].callback = null; },
  };
  return {
    env,
    timers,
    frame(ms) {
      now += ms;
      const due = waiting;
      waiting = [];
      for (const callback of due) callback(now);
    },
  };
}

/** Wait until a stream has nothing more to do by itself: neither to seek nor to fill its timeline. */
export async function settled(stream) {
  for (let quiet = 0; quiet < 3; quiet = stream.isBusy ? 0 : quiet + 1) await new Promise((resolve) => setTimeout(resolve));
}
