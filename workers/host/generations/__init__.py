"""One request as it runs here: tokens, text, phase, times, trace, and what is kept once it has
ended. Called by everything else in ``host``; imports no other room of it."""
