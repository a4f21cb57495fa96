// A table's head sorts it: numbers first by the greatest, names by the alphabet, and again the other way round.
document.querySelectorAll("table.all").forEach((table) => {
  const heads = [...table.querySelectorAll("th")], body = table.tBodies[0];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const numbers = body.rows[0].cells[column].dataset.v !== undefined;
    const first = numbers ? "descending" : "ascending", other = numbers ? "ascending" : "descending";
    const order = head.getAttribute("aria-sort") === first ? other : first;
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const compare = (a, b) => numbers ? value(a) - value(b) : value(a).localeCompare(value(b));
    [...body.rows].sort((a, b) => sign * compare(a, b)).forEach((row) => body.append(row));
  }));
});
