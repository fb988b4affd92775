// How numbers are written, the same everywhere on the page.

const INTEGER = new Intl.NumberFormat("en-US");

/** A whole number with thousands separators. */
export const formatCount = (value) => INTEGER.format(value);

/** Milliseconds with three significant digits. */
export function formatMs(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2)} ms`;
}

/** A span of time, roughly. */
export function formatSpan(ms) {
  const seconds = Math.round(ms / 1000);
  if (seconds < 100) return `${seconds} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}
