import signal
import threading

import pytest

from llm_throttle.termination import before_sigterm


@pytest.fixture
def heard():
    """What the server's own handler heard."""
    calls = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, previous)


def test_both_the_app_and_the_server_hear_of_sigterm(heard: list[int]) -> None:
    reacted = threading.Event()
    before_sigterm(reacted.set)
    signal.raise_signal(signal.SIGTERM)
    assert reacted.wait(2)
    assert heard == [signal.SIGTERM]


def test_it_reacts_once_however_often_it_was_asked_to(heard: list[int]) -> None:
    reactions: list[int] = []
    reacted = threading.Event()

    def react() -> None:
        reactions.append(1)
        reacted.set()

    before_sigterm(react)
    before_sigterm(react)
    signal.raise_signal(signal.SIGTERM)
    assert reacted.wait(2)
    assert (heard, reactions) == ([signal.SIGTERM], [1])


def test_it_is_there_again_after_a_server_has_set_its_own_handler(heard: list[int]) -> None:
    reacted = threading.Event()
    before_sigterm(reacted.set)
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    before_sigterm(reacted.set)
    signal.raise_signal(signal.SIGTERM)
    assert reacted.wait(2)


def test_without_a_servers_handler_nothing_is_changed(heard: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before_sigterm(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_outside_of_the_main_thread_nothing_is_changed(heard: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=before_sigterm, args=(lambda: None,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
