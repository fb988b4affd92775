// What every page without a stream of its own needs: the theme button and its key.

import { bindTheme } from "./theme.js";

bindTheme({ button: document.getElementById("theme-button") });
