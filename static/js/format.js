// How numbers are written, the same everywhere on the page.

const INTEGER = new Intl.NumberFormat("en-US");

/** A whole number with thousands separators. */
export const formatCount = (value) => INTEGER.format(value);

/** `part` of `whole` without decimals: 0% is said of nothing and 100% of everything alone, as the server does. */
export function formatPercent(part, whole) {
  const percent = Math.round((100 * part) / whole);
  if (percent === 0 && part > 0) return "<1%";
  return percent === 100 && part < whole ? ">99%" : `${percent}%`;
}

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
