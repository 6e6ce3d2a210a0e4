// The page of a run: reads its data and builds the opening and the five sections.

import { attentionView } from "./attend.js";
import { byId, count, el, visible } from "./dom.js";
import { speedView } from "./howfast.js";
import { losslessView } from "./lossless.js";
import { runView } from "./run.js";
import { shapeView } from "./shape.js";
import { weightsView } from "./weights.js";

const data = JSON.parse(byId("data").textContent);
const drafted = data.requests.reduce((sum, request) => sum + request.steps.length, 0);
const temperature = data.requests.length === 1 ? `, temperature ${data.requests[0].temperature}` : "";
byId("about").textContent = visible(
  `${data.title}: ${data.model}, drafted for by ${data.drafter}; verifier ${data.verifier} (${data.guarantee})${temperature}; ${count(drafted, "step")}, recorded on ${data.date.slice(0, 10)} by outrider ${data.outrider}.`,
);
byId("notes").append(...data.notes.map((note) => el("li", {}, visible(note))));
byId("footer").append(el("p", {}, "Made by outrider explain. This page is one file; it asks no server and keeps nothing."));
weightsView(data);
runView(data);
losslessView();
speedView(data);
shapeView(data);
attentionView(data);
document.body.dataset.ready = "yes";
