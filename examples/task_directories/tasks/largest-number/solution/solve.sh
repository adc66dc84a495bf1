#!/bin/sh
sort -n numbers.txt | tail -1 > answer.txt
