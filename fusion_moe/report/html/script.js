"use strict";
// Selecting a segment marks it in every pane and scrolls each pane to it.
const linked = [...document.querySelectorAll("[data-segments]")];
const panes = [...document.querySelectorAll(".pane .scroll")];

const segmentsOf = (element) => element.dataset.segments.split(" ");

function select(segments) {
  for (const element of linked) {
    const selected = segmentsOf(element).some((id) => segments.includes(id));
    element.classList.toggle("selected", selected);
    if (element.tagName === "BUTTON") element.setAttribute("aria-pressed", selected);
  }
  for (const pane of panes) {
    const first = pane.querySelector(".selected");
    if (first) pane.scrollTop += first.getBoundingClientRect().top - pane.getBoundingClientRect().top - 8;
  }
}

function selectedBy(event) {
  const element = event.target.closest("[data-segments]");
  if (element && String(getSelection()) === "") select(segmentsOf(element));
}

document.addEventListener("click", selectedBy);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.tagName !== "BUTTON") selectedBy(event);
  if (event.key === "Escape") select([]);
});
