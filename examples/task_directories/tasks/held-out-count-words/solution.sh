#!/bin/sh
wc -w < notes.txt > answer.txt
