#!/bin/sh
grep -c error log.txt > answer.txt
