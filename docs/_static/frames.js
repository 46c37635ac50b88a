// Shows the frame that the controls of a picture ask for. All frames are in the page.
for (const picture of document.querySelectorAll(".frames")) {
  const controls = [...picture.querySelectorAll("input, select")];
  const frames = [...picture.querySelectorAll(".frames-frame")];
  const output = picture.querySelector("output");
  const show = () => {
    const at = controls.map((control) => control.value).join(",");
    for (const control of controls) {
      if (control.type === "range") {
        const text = control.dataset.texts.split("|")[control.value];
        control.setAttribute("aria-valuetext", text);
        control.nextElementSibling.textContent = text;
      }
    }
    for (const frame of frames) {
      frame.hidden = frame.dataset.at !== at;
      if (!frame.hidden) output.textContent = frame.dataset.says;
    }
  };
  for (const control of controls) control.addEventListener("input", show);
  picture.querySelector(".frames-controls").hidden = false;
  show(); // a browser may have kept the controls of an earlier visit
}
