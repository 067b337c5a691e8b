"""The oracle of what a transition looks up, by its definition."""


def followed(read, prefix):
    """(token, match): what came after the latest place in `read` where the last two tokens of read + prefix stand, or
    else the last one; (-1, 0) where nothing did."""
    whole = [*read, *prefix]
    for match in (2, 1):
        for i in reversed(range(len(read) - match)):
            if len(whole) >= match and list(read[i : i + match]) == whole[-match:]:
                return int(read[i + match]), match
    return -1, 0
