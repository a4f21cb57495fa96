const rounds = JSON.parse(document.getElementById("data").textContent);
const panel = document.getElementById("round");
const show = (r) => {
  const e = r.expected, draft = r.draft.map((d, i) =>
    `  ${i < r.accepted ? "+" : "-"} ${d.id}${d.p === undefined || d.p === null ? "" : "  p " + d.p.toFixed(3)}`).join("\n");
  panel.textContent = `round ${r.iteration} of session ${r.session}, ${r.us} us\n` +
    `position ${r.position}, after token ${r.last}\n` +
    `${r.drafter ?? "no drafter"}, ${r.path}\n` +
    `${r.rows} rows because: ${r.reason}\n${draft}\naccepted ${r.accepted}, next ${r.next}\n\n` +
    `expected ${e.tokens.toFixed(2)} tokens in ${e.ms.toFixed(2)} ms\n` +
    `a plain step takes ${e.plain_ms.toFixed(2)} ms\n` +
    `saved so far, plus the loss budget: ${e.balance.toFixed(1)} plain steps\n\n` +
    `draft ${r.us_draft} us, waited ${r.us_wait}\nverify ${r.us_verify} us\naccept ${r.us_accept} us`;
};
document.addEventListener("mouseover", (event) => {
  const token = event.target.closest("[data-round]");
  if (!token) return;
  document.querySelectorAll(".same").forEach((other) => other.classList.remove("same"));
  document.querySelectorAll(`[data-round="${token.dataset.round}"]`).forEach((own) => own.classList.add("same"));
  show(rounds[token.dataset.round]);
});
