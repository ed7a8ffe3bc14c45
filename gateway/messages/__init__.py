"""Anthropic's Messages API: conversion of requests, answers and refusals."""
