"""Asks about a conversation, live or over, in text: the endpoint answers from what it wrote down, and the conversation
goes on undisturbed.

    python examples/ask_a_session.py                                  # lists the sessions
    python examples/ask_a_session.py sess_... "where is the key"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def call(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", nargs="?")
    parser.add_argument("question", nargs="?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none-needed-here", help="one of the endpoint's A2T_API_KEYS")
    args = parser.parse_args(argv)

    if args.session is None:
        for session in call(f"{args.url}/v1/sessions", args.key)["data"]:
            print(session["id"], session["state"], f"{session.get('units', 0)} s")
    elif args.question is None:
        for line in call(f"{args.url}/v1/sessions/{args.session}", args.key)["transcript"]:
            print(f"{line['unit']:4d} s", line["transcript"] or f"-> {line['response']}")
    else:
        print(call(f"{args.url}/v1/sessions/{args.session}/query", args.key, {"question": args.question})["answer"])


if __name__ == "__main__":
    try:
        main()
    except HTTPError as error:  # what the endpoint has to say is in the body
        sys.exit(json.load(error)["error"]["message"])
    except OSError as error:
        sys.exit(f"no endpoint answers ({error}); start one: serve run serve_apps.app:app")
