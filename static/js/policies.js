// The dialog in which the scheduler's policies are changed. htmx sends the form; here is what it cannot do: begin with the
// policies in force, say what the server refused, and close when they are changed.

const byId = (id) => document.getElementById(id);

/** What a refusal says, in a few words: the body is problem details, or an error as the API gives it. */
export function describeProblem(status, text) {
  try {
    const body = JSON.parse(text);
    const words = body.detail ?? body.error?.message;
    if (typeof words === "string" && words !== "") return words;
  } catch {
    // Not JSON: a proxy's page, say.
  }
  return status ? `The server answered with error ${status}.` : "The server does not answer.";
}

/** Wires the dialog. `announce(text)` says something. */
export function bindPolicies({ announce }) {
  const dialog = byId("policy-dialog");
  const form = byId("policy-form");
  const problem = byId("policy-problem");

  const tell = (words) => {
    problem.textContent = words;
    problem.hidden = words === "";
  };
  document.addEventListener("click", ({ target }) => {
    if (!target.closest?.("#policy-button")) return; // it is part of what is swapped
    const now = byId("policies-now").dataset;
    for (const select of form.querySelectorAll("select")) select.value = now[select.name];
    tell("");
    dialog.showModal();
  });
  byId("policy-cancel").addEventListener("click", () => dialog.close());
  form.addEventListener("htmx:after:request", ({ detail: { ctx } }) => {
    if (ctx.response.status >= 400) {
      tell(describeProblem(ctx.response.status, ctx.text));
      return;
    }
    dialog.close();
    announce("The policies are changed from the next step on");
    document.body.dispatchEvent(new CustomEvent("engine:tick"));
  });
  form.addEventListener("htmx:error", () => tell(describeProblem(0, "")));
}
