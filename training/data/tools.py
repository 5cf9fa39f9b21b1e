"""Tool-call tasks: one to three declared tools, a request, the one right call."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training.data.words import DAYS, ITEMS, NAMES

_CITIES = [
    "Rome",
    "Paris",
    "Oslo",
    "Madrid",
    "Vienna",
    "Lisbon",
    "Prague",
    "Dublin",
    "Athens",
    "Berlin",
    "Tokyo",
    "Cairo",
    "Lima",
    "Quito",
    "Delhi",
]


@dataclass(frozen=True, slots=True)
class ToolTask:
    """Declared tools, the request, and the call it asks for."""

    tools: tuple[Mapping[str, Any], ...]
    question: str
    name: str
    arguments: Mapping[str, str | int]


def _tool(name: str, description: str, **kinds: str) -> Mapping[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in kinds.items()},
        "required": list(kinds),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = {
    "get_weather": _tool("get_weather", "Weather of a city", city="string", days="integer"),
    "set_alarm": _tool("set_alarm", "Set an alarm", day="string", hour="integer"),
    "send_message": _tool("send_message", "Send a short message", to="string", text="string"),
    "add_item": _tool("add_item", "Add to the shopping list", item="string", amount="integer"),
    "convert": _tool("convert", "Convert kilometers to miles", value="integer"),
}
_TEXTS = (
    "I am late",
    "see you soon",
    "call me back",
    "the train is gone",
    "dinner is ready",
    "thank you",
)


def tool_task(rng: random.Random) -> ToolTask:
    """One request with its call."""
    name = rng.choice(tuple(TOOLS))
    match name:
        case "get_weather":
            city, days = rng.choice(_CITIES), rng.randint(1, 9)
            frames = (
                "What is the weather in {city} for {days} days?",
                "Show me {days} days of weather in {city}.",
            )
            arguments: dict[str, str | int] = {"city": city, "days": days}
        case "set_alarm":
            arguments = {"day": rng.choice(DAYS), "hour": rng.randint(1, 23)}
            frames = ("Set an alarm on {day} at {hour}.", "Wake me at {hour} on {day}.")
        case "send_message":
            arguments = {"to": rng.choice(NAMES), "text": rng.choice(_TEXTS)}
            frames = ("Send {to} the message: {text}", "Tell {to}: {text}")
        case "add_item":
            arguments = {"item": rng.choice(ITEMS)[0], "amount": rng.randint(2, 40)}
            frames = (
                "Add {amount} {item} to my list.",
                "Put {amount} {item} on the shopping list.",
            )
        case _:
            arguments = {"value": rng.randint(1, 999)}
            frames = (
                "How many miles are {value} kilometers?",
                "Convert {value} kilometers to miles.",
            )
    others = rng.sample([n for n in TOOLS if n != name], rng.randint(0, 2))
    declared = rng.sample([name, *others], 1 + len(others))
    question = rng.choice(frames).format(**arguments)
    return ToolTask(tuple(TOOLS[n] for n in declared), question, name, arguments)
