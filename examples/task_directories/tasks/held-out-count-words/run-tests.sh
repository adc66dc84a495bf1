#!/bin/sh
[ "$(tr -d " " < /app/answer.txt)" = "$(cat "$TEST_DIR/right.txt")" ]
