"""The line of one tier: round-robin over flows (docs/algorithm.md has a worked example).

A flow that joins an empty-handed gets the turn after the one being served, on the first *lap*
of that turn; each further ticket of the flow gets the next turn, on the second lap. So whoever
comes alone stands behind at most one ticket of every other flow, and newcomers cannot hold back
a turn that has begun. Places belong to the flow: when one of its tickets leaves, those behind it
move up into the places of their predecessors, so that a user who cancels owes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from .ordered import Ordered
from .records import State, Ticket

FIRST_LAP, SECOND_LAP = 0, 1

Place = tuple[int, int]


class FairQueue:
    """The waiters of one tier, those who can be served in order of service."""

    def __init__(self, tickets: Mapping[str, Ticket]) -> None:
        self.turn = 0
        self.in_line = 0
        """All who keep a place here: waiting, parked and away."""
        self._tickets = tickets
        self._ready = Ordered()

    def __len__(self) -> int:
        return len(self._ready)

    def __getitem__(self, rank: int) -> Ticket:
        return self._tickets[self._ready[rank][-1]]

    def ahead(self, ticket: Ticket) -> int:
        """How many would be served before this one, were nobody to come or go."""
        return self._ready.rank(ticket.key)

    def join(self, ticket: Ticket, line: list[str]) -> None:
        """Put a ticket into the line of its flow, by order of arrival."""
        places = self._places(line)
        last_turn = places[-1][0] if places else self.turn
        places.append((max(self.turn, last_turn) + 1, SECOND_LAP if places else FIRST_LAP))
        index = len(line)
        while index and self._tickets[line[index - 1]].order > ticket.order:
            index -= 1
        line.insert(index, ticket.id)
        self._assign(line, places, index)
        self.in_line += 1

    def leave(self, ticket: Ticket, line: list[str]) -> None:
        """Take a ticket out; those of its flow behind it move up."""
        places = self._places(line)
        index = line.index(ticket.id)
        self.pause(ticket)
        del line[index]
        self._assign(line, places[:-1], index)
        self.in_line -= 1

    def serve(self, ticket: Ticket, line: list[str]) -> None:
        """Take a ticket out because it is granted: this costs the flow its turn."""
        self.pause(ticket)
        line.remove(ticket.id)
        self.turn = max(self.turn, ticket.turn)
        if line and self._tickets[line[0]].turn <= self.turn:
            self._catch_up(line)
        self.in_line -= 1

    def resume(self, ticket: Ticket) -> None:
        """Count a ticket among those who can be served."""
        if ticket.state is State.WAITING:
            self._ready.add(ticket.key)

    def pause(self, ticket: Ticket) -> None:
        """Let a ticket keep its place without being served."""
        self._ready.remove(ticket.key)

    def _catch_up(self, line: list[str]) -> None:
        """Move what a flow that was served still has up to the present turn behind it.

        Tickets that were parked or away stand in past turns; without this a flow would use all
        of them at once when they are back, before anybody else's first.
        """
        last = self.turn
        places = []
        for turn, lap in self._places(line):
            last = max(turn, last + 1)
            places.append((last, lap if turn == last else SECOND_LAP))
        self._assign(line, places, 0)

    def _places(self, line: list[str]) -> list[Place]:
        return [(self._tickets[id].turn, self._tickets[id].lap) for id in line]

    def _assign(self, line: list[str], places: list[Place], start: int) -> None:
        for id, (turn, lap) in zip(line[start:], places[start:], strict=True):
            ticket = self._tickets[id]
            if (ticket.turn, ticket.lap) != (turn, lap):
                self.pause(ticket)
                ticket.turn, ticket.lap = turn, lap
                self.resume(ticket)
