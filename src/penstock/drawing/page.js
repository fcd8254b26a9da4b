"use strict";
for (const viewer of document.querySelectorAll(".viewer")) {
  const box = viewer.querySelector(".scroll"), picture = box.querySelector("svg");
  const readout = viewer.querySelector(".readout"), bar = viewer.querySelector(".bar");
  const natural = picture.viewBox.baseVal.width, hint = readout.textContent;
  const plainWheel = viewer.dataset.wheel === "plain";
  bar.hidden = false;

  const keepInView = () => {
    const shift = box.scrollLeft * natural / picture.clientWidth;
    for (const part of picture.querySelectorAll(".stay")) part.setAttribute("transform", `translate(${shift} 0)`);
  };
  const show = (width, x = box.clientWidth / 2, y = 0) => {
    const before = picture.clientWidth;
    const after = Math.min(Math.max(width, box.clientWidth * 0.5, 200), natural * 12);
    const left = (box.scrollLeft + x) * after / before - x, top = (box.scrollTop + y) * after / before - y;
    picture.style.width = `${after}px`;
    box.scrollLeft = left;
    box.scrollTop = top;
    keepInView();
  };
  const actions = {
    in: () => show(picture.clientWidth * 1.4),
    out: () => show(picture.clientWidth / 1.4),
    fit: () => show(box.clientWidth),
    natural: () => show(natural),
  };
  // A little too wide is better seen whole; much too wide would only be a smear.
  const aLittle = natural > box.clientWidth && natural < 1.7 * box.clientWidth;
  const phone = box.clientWidth < 520;
  if (aLittle || phone || viewer.dataset.start === "fit") actions.fit();
  bar.addEventListener("click", event => actions[event.target.dataset.zoom]?.());
  box.addEventListener("keydown", event => {
    const action = { "+": "in", "=": "in", "-": "out", "0": "natural" }[event.key];
    if (action && !event.ctrlKey && !event.metaKey) actions[action]();
  });
  box.addEventListener("scroll", keepInView);
  box.addEventListener("wheel", event => {
    if (!(plainWheel || event.ctrlKey || event.metaKey) || event.shiftKey || event.deltaY === 0) return;
    event.preventDefault();
    const frame = box.getBoundingClientRect();
    show(picture.clientWidth * Math.exp(-event.deltaY / 400), event.clientX - frame.left, event.clientY - frame.top);
  }, { passive: false });

  let grip = null;
  box.addEventListener("pointerdown", event => {
    if (event.pointerType === "mouse" && event.button === 0)
      grip = { x: event.clientX + box.scrollLeft, y: event.clientY + box.scrollTop };
  });
  window.addEventListener("pointermove", event => {
    if (!grip) return;
    box.classList.add("dragging");
    box.scrollLeft = grip.x - event.clientX;
    box.scrollTop = grip.y - event.clientY;
  });
  window.addEventListener("pointerup", () => { grip = null; box.classList.remove("dragging"); });

  const byMicrobatch = new Map();
  for (const span of picture.querySelectorAll(".span")) {
    const [, kind, microbatch] = span.dataset.op.match(/^\d+(\D+)(\d+)(?:\.\d+)?$/);
    if (kind === "UPDATE") continue;
    if (!byMicrobatch.has(microbatch)) byMicrobatch.set(microbatch, []);
    byMicrobatch.get(microbatch).push(span);
    span.dataset.microbatch = microbatch;
  }
  let traced = [];
  const trace = span => {
    for (const one of traced) one.classList.remove("traced");
    traced = byMicrobatch.get(span?.dataset.microbatch) ?? [];
    for (const one of traced) one.classList.add("traced");
    picture.classList.toggle("tracing", traced.length > 0);
    readout.textContent = span ? span.querySelector("title").textContent : hint;
  };
  picture.addEventListener("pointerover", event => trace(event.target.closest(".span")));
  picture.addEventListener("pointerleave", () => trace(null));
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", async () => {
    const words = button.textContent;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      // Where a page may not write there, the command is marked, and the reader copies it.
      getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
      button.textContent = "Marked";
    }
    setTimeout(() => { button.textContent = words; }, 1500);
  });
}
