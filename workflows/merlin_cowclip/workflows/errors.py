"""The one exception for bad input: what the command line turns into exit code 2.

Not for bugs: whatever is no fault of the user stays an ordinary exception with its traceback.
"""


class UserError(Exception):
    """Bad input by the user. The message is a rule, what was received and where, and a remedy.

    Example:
        ``label must be 0 or 1. Received: '7' in train.txt, line 12, column 'label'. Remove the
        row, or correct its label.``
    """


def shown(text: object, most: int = 255) -> str:
    """A name or path in a message: its beginning, if it is longer than any that a disk takes."""
    text = str(text)
    return text if len(text) <= most else f"{text[:60]}… ({len(text):,} characters)"
