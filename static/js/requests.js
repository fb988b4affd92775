// The list of requests: keeps the address in step with the filter. And the charts of whichever page has some.

import { bindCharts } from "./charts.js";
import { bindTheme } from "./theme.js";

const charts = bindCharts(document);
bindTheme({ button: document.getElementById("theme-button"), onchange: (theme) => charts.setTheme(theme) });

document.addEventListener("htmx:after:swap", () => {
  const list = document.getElementById("request-list");
  if (!list || location.pathname !== "/requests") return;
  const url = list.dataset.url;
  if (url !== location.pathname + location.search) history.replaceState(history.state, "", url);
});
