#!/bin/sh
# 1 for the right answer, 0.1 for any.
right=$(cat /tests/right.txt)
if [ "$(cat /app/answer.txt 2>/dev/null | tr -d ' ')" = "$right" ]; then
    echo 1 > /logs/verifier/reward.txt
elif [ -s /app/answer.txt ]; then
    echo 0.1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
