"""Where a completion's next tokens have probably been written before: an index over the texts of one prompt.

The texts are the prompt, its completions, finished or still growing, and those of an earlier call. A :class:`Cursor`
follows a text; each token that it takes is first compared with what the cursor expected (so that the hit rate is known
before anything is drafted), then indexed, then looked up: the newest place where the last 8, 4 or 2 tokens stood before
is where the text may go on; where there is none, the newest place of the last token. A match that holds grows with each
token; a newer place takes over unless the match is longer than the run that found it.

Runs of 2, 4 and 8 tokens are known by name: a run of 2n is the pair of the names of its halves (prefix doubling; Karp,
Miller and Rosenberg 1972, "Rapid identification of repeated patterns"). A token thus costs at most four dictionary
look-ups whatever the length of the text, names never collide, and nothing is ever rescanned. A run is named once its
second half has been seen before, so that text which never repeats costs two look-ups (ours). An index that has taken in
``max_tokens`` forgets them and begins anew with the texts as they go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NUM_LEVELS = 6
"""Hit rates are kept apart by the bits of the match length: 1, 2-3, 4-7, 8-15, 16-31, and 32 or more tokens."""
MEMORY_TRIALS = 512
"""Expectations that a level's hit rate remembers; beyond, old ones fade by halves (ours)."""
TRIAL_TOKENS = 128
"""Tokens of completions that an index reads before it may be found useless (ours)."""
LEAST_HITS = 1 / 8
"""Share of the tokens read that must have been expected rightly for more than the newest to be worth reading (ours)."""
MEMORY_TOKENS = 32
"""Newest tokens, about, by which a text's own hits are counted (ours)."""


_Recent = tuple["_Run | None", ...]


class HitRates:
    """How often the expected token came, by length of the match that expected it, over all prompts of a call."""

    __slots__ = ("hits", "num_hits", "num_read", "trials")

    def __init__(self) -> None:
        self.num_read = 0
        """Tokens of completions read."""
        self.num_hits = 0
        """Of these, how many had been expected."""
        self.hits = [0] * (NUM_LEVELS + 1)
        self.trials = [0] * (NUM_LEVELS + 1)

    @property
    def is_promising(self) -> bool:
        """Whether enough of the tokens read had been expected for reading more."""
        return self.num_hits >= LEAST_HITS * max(self.num_read, 1)

    def by_level(self) -> list[float]:
        """[NUM_LEVELS + 1], of level 0 nothing. Posterior means under a uniform prior; 0.5 before anything was seen."""
        return [(hits + 1) / (trials + 2) for hits, trials in zip(self.hits, self.trials, strict=True)]

    def fade(self, level: int) -> None:
        self.hits[level] //= 2
        self.trials[level] //= 2


class _Run:
    """A run of tokens and what followed its newest occurrence: ``source[place]``."""

    __slots__ = ("place", "source")

    def __init__(self) -> None:
        self.source: list[int] | None = None
        self.place = 0


class DraftIndex:
    """The texts of one prompt. O(1) per token; memory is bounded by ``max_tokens``."""

    def __init__(
        self, prompt: Iterable[int], rates: HitRates, max_tokens: int, trial_tokens: int = TRIAL_TOKENS
    ) -> None:
        self.rates = rates
        self.num_tokens = 0
        """Indexed at present."""
        self.num_read = 0
        """Tokens of completions read."""
        self.num_hits = 0
        """Of these, how many had been expected."""
        self.max_tokens = max_tokens
        self.trial_tokens = trial_tokens
        self.ones: dict[int, tuple[list[int], int]] = {}
        """Token -> what followed its newest occurrence: (text, place)."""
        self.twos: dict[tuple[int, int], _Run] = {}
        self.pairs: dict[tuple[_Run, _Run], _Run] = {}
        """Fours and eights by their halves."""
        self._prompt = Cursor(self)
        before = rates.num_read, rates.num_hits
        self._prompt.extend(prompt)
        rates.num_read, rates.num_hits = before
        self.num_read = self.num_hits = 0

    @property
    def is_promising(self) -> bool:
        """Whether the completions read so far repeat each other, the prompt or themselves, or are too few to tell."""
        return self.num_read < self.trial_tokens or self.num_hits >= LEAST_HITS * max(self.num_read, 1)

    def forget(self) -> None:
        """Drop all runs; matches that go on are not broken."""
        self.ones.clear()
        self.twos.clear()
        self.pairs.clear()
        self.num_tokens = 0

    def new_text(self) -> Cursor:
        """A text that begins behind the prompt."""
        return Cursor(self, behind=self._prompt)


class Cursor:
    """The end of one text, and the place where it may go on.

    ``match_length`` tokens at least before ``source[place]`` are those that the text ends with; 0: nothing is expected.
    """

    __slots__ = (
        "_index", "_last", "_runs", "match_length", "num_expected", "num_hits", "num_read", "place", "source", "text",
    )  # fmt: skip

    def __init__(self, index: DraftIndex, behind: Cursor | None = None) -> None:
        self._index = index
        self.text: list[int] = []
        self.source: list[int] = []
        self.place = 0
        self.match_length = 0
        self.num_read = 0.0
        """Tokens read; at most ``MEMORY_TOKENS``, beyond which this and the next two fade alike."""
        self.num_hits = 0.0
        """Of these, how many had been expected."""
        self.num_expected = 0.0
        """How many would have been by the hit rates of all texts at matches as long."""
        self._last = behind._last if behind else -1
        """The newest token, also of the text before."""
        self._runs: _Recent = behind._runs if behind else (None,) * 7
        """Names of the runs that end at the newest tokens: two, two before, four, four before (3 times), eight."""

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with these tokens."""
        # One loop without calls: this is all that drafting costs on text that cannot be drafted.
        index, text, rates = self._index, self.text, self._index.rates
        ones, twos, pairs = index.ones, index.twos, index.pairs
        hits, trials = rates.hits, rates.trials
        last, length, source, place = self._last, self.match_length, self.source, self.place
        two, two_1, four, four_1, four_2, four_3, eight = self._runs
        begin = here = len(text)
        num_hits, num_expected = 0, 0.0
        for token in tokens:
            if length:  # compare what was expected with what came
                level = length.bit_length()
                if level > NUM_LEVELS:
                    level = NUM_LEVELS
                num_expected += (hits[level] + 1) / (trials[level] + 2)
                trials[level] += 1
                if source[place] == token:
                    hits[level] += 1
                    num_hits += 1
                    place += 1
                    length += 1
                else:
                    length = 0
                if trials[level] >= MEMORY_TRIALS:
                    rates.fade(level)
            index.num_tokens += 1
            if index.num_tokens > index.max_tokens:
                index.forget()
            if two is not None:  # the token is what follows the runs before it
                two.source, two.place = text, here
                if four is not None:
                    four.source, four.place = text, here
                    if eight is not None:
                        eight.source, eight.place = text, here
            ones[last] = text, here
            text.append(token)
            here += 1

            two_2, two_1 = two_1, two
            four_4, four_3, four_2, four_1 = four_3, four_2, four_1, four
            four = eight = None
            key = (last, token)
            last = token
            two = twos.get(key)
            if two is None:
                two = twos[key] = _Run()
            elif two.source is not None and two_2 is not None:
                four = pairs.get((two_2, two))
                if four is None:
                    four = pairs[two_2, two] = _Run()
                elif four.source is not None and four_4 is not None:
                    eight = pairs.get((four_4, four))
                    if eight is None:
                        eight = pairs[four_4, four] = _Run()

            if length and place >= len(source):
                length = 0
            if length <= 8 and eight is not None and eight.source is not None:
                source, place, length = eight.source, eight.place, max(length, 8)
            elif length <= 4 and four is not None and four.source is not None:
                source, place, length = four.source, four.place, max(length, 4)
            elif length <= 2 and two is not None and two.source is not None:
                source, place, length = two.source, two.place, max(length, 2)
            elif not length and token in ones:
                source, place = ones[token]
                length = 1
        self._last, self.match_length, self.source, self.place = last, length, source, place
        self._runs = (two, two_1, four, four_1, four_2, four_3, eight)
        index.num_read += here - begin
        index.num_hits += num_hits
        rates.num_read += here - begin
        rates.num_hits += num_hits
        self.num_read += here - begin
        self.num_hits += num_hits
        self.num_expected += num_expected
        if self.num_read > MEMORY_TOKENS:
            kept = MEMORY_TOKENS / self.num_read
            self.num_read, self.num_hits, self.num_expected = (
                kept * self.num_read,
                kept * self.num_hits,
                kept * self.num_expected,
            )

    def skip(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens (one at least), and they are not looked at."""
        self.text.extend(tokens)
        self._last, self._runs, self.match_length = tokens[-1], (None,) * 7, 0

    def draft(self, most: int) -> list[int]:
        """At most ``most`` tokens that may come next. A text that repeats itself is drafted beyond its own end."""
        if not self.match_length:
            return []
        tokens = self.source[self.place : self.place + most]
        if self.source is self.text and len(tokens) < most:
            tokens = (tokens * (-(-most // len(tokens))))[:most]
        return tokens
