"""An engine as a head sees one: pages handed out and taken back, prompts read in chunks, requests that are preempted,
moved, and share the pages of a common beginning. It computes nothing fast: every forward reads all tokens anew.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from ctcdraft.serve.state import Pages

PAGE = 4


@dataclass
class Served:
    prompt: list
    limit: int
    tokens: list = field(default_factory=list)  # read and written
    computed: int = 0
    pages: list = field(default_factory=list)
    draft: list = field(default_factory=list)
    steps: int = 0
    nodes: list = field(default_factory=list)
    accepted: list = field(default_factory=list)

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def answer(self):
        return self.tokens[len(self.prompt) :]


class PagedEngine:
    """drafter_of(pages): what drafts. Tests plant faults by putting other methods in the place of its own."""

    def __init__(self, base, drafter_of, attended, pages=64, prefix_caching=False):
        self.base, self.attended = base, attended
        self.pages = None
        if attended is not None:
            one = torch.full((1, attended.heads, attended.width), torch.nan, dtype=base.dtype)  # where nobody writes
            self.pages = Pages.like(one, one, attended.layers, pages, PAGE)
        self.drafter = drafter_of(self.pages)
        self.free, self.requests, self.cached = list(range(pages)), [], {} if prefix_caching else None
        self.seen = []  # (tokens, draft) of each draft that was made

    def add(self, prompt, limit):
        self.requests.append(Served(list(prompt), limit))
        return self.requests[-1]

    def begin(self, request):
        """Take over the pages of a beginning that another request has read."""
        if self.cached is None or request.computed:
            return
        for end in range(PAGE, len(request.tokens), PAGE):
            page = self.cached.get(tuple(request.tokens[:end]))
            if page is None:
                return
            request.pages.append(page)
            request.computed = end

    def preempt(self, request):
        if self.cached is None:
            self.free.extend(request.pages)
        request.pages, request.computed, request.draft = [], 0, []

    def step(self, chunks):
        """One forward of the requests in `chunks`, in that order, of at most so many prompt tokens of each."""
        rows = []  # hidden states of all, one behind the other
        starts, places = [], []
        for request, most in chunks:
            self.begin(request)
            known = len(request.tokens) - request.computed
            count = min(known, most)
            draft = request.draft if count == known else []
            ids = [*request.tokens[: request.computed + count], *draft]
            while len(request.pages) * PAGE < len(ids):
                request.pages.append(self.free.pop(0))
            states = self.base.hidden(torch.tensor([ids]), attended=self.attended)[0, request.computed :]
            positions = np.arange(request.computed, len(ids))
            slots = [request.pages[p // PAGE] * PAGE + p % PAGE for p in positions]
            starts.append(sum(map(len, rows)))
            rows.append(states)
            places.append((count, draft, slots))
        self.forward(torch.cat(rows), [slot for _, _, slots in places for slot in slots])
        asked = []
        for (request, _), start, states, (count, draft, _) in zip(chunks, starts, rows, places, strict=True):
            accepted = 0
            if request.computed + count == len(request.tokens):
                said = self.base.logits(states[count - 1 :]).argmax(-1).tolist()
                while accepted < len(draft) and draft[accepted] == said[accepted]:
                    accepted += 1
                self.take(request, draft, [*draft[:accepted], said[accepted]])
                if len(request.answer) < request.limit and request.tokens[-1] not in self.base.eos_ids:
                    asked.append((request, start + count - 1 + accepted))
            request.computed += count + accepted
            request.draft = []
            self.cache(request)
        self.propose(asked, torch.cat(rows))

    def take(self, request, draft, said):
        first = len(request.tokens) == len(request.prompt)
        if not first:
            request.steps += 1
            request.nodes.append(len(draft))
            request.accepted.append(len(said) - 1)
        for token in said[: request.limit - len(request.answer)]:
            request.tokens.append(token)
            if token in self.base.eos_ids:
                break

    def cache(self, request):
        for end in range(PAGE, request.computed + 1, PAGE) if self.cached is not None else ():
            self.cached.setdefault(tuple(request.tokens[:end]), request.pages[end // PAGE - 1])

    def forward(self, states, slots):
        """What the layers leave in the engine's pages."""
        if self.attended is not None:
            slots = torch.tensor(slots)
            for layer, (keys, values) in self.attended.keys_and_values(states.unsqueeze(0)).items():
                self.write(layer, keys[0].transpose(0, 1), values[0].transpose(0, 1), slots)

    def write(self, layer, keys, values, slots):
        self.pages.write(layer, keys, values, slots)

    def propose(self, asked, states):
        if not asked:
            return
        width = max(len(request.pages) for request, _ in asked)
        table = torch.zeros(len(asked), width, dtype=torch.int32)
        for row, (request, _) in zip(table, asked, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages)
        read = [np.array(request.tokens) for request, _ in asked]
        rooms = [request.limit - len(request.answer) - 1 for request, _ in asked]
        hidden = states[[row for _, row in asked], : 2 * self.base.hidden_size]
        for (request, _), tree in zip(asked, self.drafter.drafts(hidden, read, table, rooms), strict=True):
            request.draft = tree.tokens.tolist()
            self.seen.append((tuple(request.tokens), request.limit, tuple(request.draft)))

    @property
    def unfinished(self):
        ends = self.base.eos_ids
        return [r for r in self.requests if len(r.answer) < r.limit and not (r.answer and r.answer[-1] in ends)]
