"use strict";
// Steps through the answers that the page holds. Text becomes text nodes only: it is other people's.
const answers = JSON.parse(document.getElementById("answers").textContent);
const at = (id) => document.getElementById(id);
const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥");

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

let answer, chosen, ends; // ends[k]: tokens behind step k; step 0 is the prompt's own forward

function open(number) {
  answer = answers[number];
  ends = [1];
  for (const step of answer.steps) ends.push(ends[ends.length - 1] + step.taken);
  at("question").textContent = answer.question;
  const spans = answer.tokens.map((text) => element("span", "", text));
  answer.steps.forEach((step, k) => {
    for (let i = ends[k]; i < ends[k + 1]; i++) {
      spans[i].dataset.step = k + 1;
      const depth = i - ends[k] + 1;
      if (depth <= step.path.length) spans[i].style.setProperty("--depth", Math.min(depth, 8));
    }
  });
  at("answer").replaceChildren(...spans);
  at("step").max = answer.steps.length;
  at("other").hidden = answer.plain.text === null;
  at("text").textContent = answer.plain.text;
  choose(1);
}

function choose(step) {
  chosen = Math.max(1, Math.min(answer.steps.length, step));
  at("step").value = chosen;
  show(chosen);
}

function show(k) {
  const step = answer.steps[k - 1];
  if (!step) return;
  const steps = answer.steps.length;
  at("where").textContent = `step ${k} of ${steps}`;
  for (const span of at("answer").children) span.classList.toggle("now", Number(span.dataset.step) === k);
  const expected = step.nodes ? step.nodes.reduce((sum, node) => sum + node[2], 0).toFixed(2) : "?";
  at("found").textContent =
    `${step.path.length} of ${step.drafted} draft tokens accepted (expected ${expected}). ` +
    `One forward of the base gave ${step.taken === 1 ? "a token" : `${step.taken} tokens`}.`;
  at("tree").replaceChildren(...(step.nodes ? tree(step, k) : [element("p", "", "The tree of this step was not kept.")]));
  const plain = Math.max(1, answer.plain.tokens - 1, ends[steps] - 1);
  at("here").style.width = `${(80 * k) / plain}%`;
  at("plain").style.width = `${(80 * (ends[k] - 1)) / plain}%`;
  at("race").textContent =
    `${ends[k]} tokens by now: ${k} forwards of the base behind the prompt's, plain decoding ${ends[k] - 1}. ` +
    `The whole answer: ${steps} steps and ${answer.seconds.toFixed(2)} s, ` +
    `plain decoding ${answer.plain.tokens - 1} and ${answer.plain.seconds.toFixed(2)} s.`;
}

// A chain stands in one line; where the tree branches, each branch has a line of its own.
function tree(step, k) {
  const children = step.nodes.map(() => []).concat([[]]);
  const root = step.nodes.length;
  step.nodes.forEach((node, i) => children[node[1] < 0 ? root : node[1]].push(i));
  const last = step.path.length ? step.path[step.path.length - 1] : root;
  const accepted = new Set(step.path);
  const own = step.taken > step.path.length ? answer.tokens[ends[k] - 1] : null;

  function node(i) {
    const [text, , psi, source] = step.nodes[i];
    const made = element("span", `node ${accepted.has(i) ? "yes" : "no"}`);
    made.append(element("b", "", visible(text)), element("small", "", psi.toFixed(2)));
    made.title = `psi ${psi.toFixed(3)}, from ${source}, ${accepted.has(i) ? "accepted" : "rejected"}`;
    return made;
  }
  function ownNode() {
    const made = element("span", "node own");
    made.append(element("b", "", visible(own)), element("small", "", "the base's own"));
    return made;
  }
  function behind(i) {
    const line = [];
    for (;;) {
      const branches = children[i].map((child) => [node(child), child]);
      if (i === last && own !== null) branches.unshift([ownNode(), null]);
      if (branches.length !== 1) {
        if (!branches.length) return line;
        const list = element("ul");
        for (const [made, child] of branches) {
          const item = element("li");
          item.append(made, ...(child === null ? [] : behind(child)));
          list.append(item);
        }
        return [...line, list];
      }
      line.push(branches[0][0]);
      if (branches[0][1] === null) return line;
      i = branches[0][1];
    }
  }
  const before = element("span", "node root");
  before.append(element("b", "", visible(answer.tokens[ends[k - 1] - 1])), element("small", "", "root"));
  return [before, ...behind(root)];
}

const moves = { ArrowRight: (k) => k + 1, ArrowLeft: (k) => k - 1, Home: () => 1, End: () => answer.steps.length };
if (answers.length) {
  at("which").append(...answers.map((one, i) => {
    const option = element("option", "", `${one.head}: ${one.category}: ${one.question.slice(0, 60)}`);
    option.value = i;
    return option;
  }));
  at("which").addEventListener("change", (event) => open(Number(event.target.value)));
  at("step").addEventListener("input", (event) => choose(Number(event.target.value)));
  at("back").addEventListener("click", () => choose(chosen - 1));
  at("next").addEventListener("click", () => choose(chosen + 1));
  const stepOf = (event) => Number(event.target.dataset.step);
  at("answer").addEventListener("click", (event) => stepOf(event) && choose(stepOf(event)));
  at("answer").addEventListener("pointerover", (event) => stepOf(event) && show(stepOf(event)));
  at("answer").addEventListener("pointerleave", () => show(chosen));
  at("answer").addEventListener("keydown", (event) => {
    if (!moves[event.key]) return;
    event.preventDefault();
    choose(moves[event.key](chosen));
  });
  open(0);
}
