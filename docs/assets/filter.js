// A field above each long table that hides the rows without the words typed into it.
const LONG = 20;

function addFilter(table) {
  const rows = Array.from(table.tBodies[0].rows);
  const field = document.createElement("input");
  field.type = "search";
  field.className = "table-filter";
  field.placeholder = `Filter ${rows.length} rows`;
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  // The theme wraps tables so that they scroll by themselves; the field stays in place.
  const place = table.closest(".md-typeset__scrollwrap") ?? table;
  place.parentNode.insertBefore(field, place);
}

function addFilters() {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    if (table.tBodies.length && table.tBodies[0].rows.length > LONG) addFilter(table);
  }
}

document.addEventListener("DOMContentLoaded", addFilters);
