"""Secrets stay out of all that is written or said: configs, manifests, W&B, sentences about errors."""

import os
import re
from typing import Any

URL = re.compile(r"\w+://[^\s'\"]+")
USER = re.compile(r"(?<=://)[^/]*@")
QUERY = re.compile(r"([?&][^=&#]*=)[^&#]+")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
SHORTEST = 8  # characters: shorter values of the environment are words, not secrets
STARS = "***"


def masked(value: Any) -> Any:
    """The same text, or the same dicts and lists of text, with stars for users, passwords and queries of URLs, and for
    what the environment holds as KEY, TOKEN, SECRET or PASSWORD."""
    if isinstance(value, str):
        text = URL.sub(lambda url: QUERY.sub(rf"\g<1>{STARS}", USER.sub(f"{STARS}@", url[0])), value)
        for name, secret in os.environ.items():
            if SECRET.search(name) and len(secret.strip()) >= SHORTEST:
                text = text.replace(secret.strip(), STARS)
        return text
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(inner) for inner in value]
    return value
