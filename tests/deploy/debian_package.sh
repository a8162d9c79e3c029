#!/usr/bin/env bash
# Unpacks a Debian package without installing it: debian_package.sh NAME FOLDER
set -euo pipefail
name=$1
mkdir -p "$2"
folder=$(realpath "$2")
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state/lists/partial" "$state/archives/partial"
options=(-qq -o "Dir::State::Lists=$state/lists" -o "Dir::Cache=$state" -o "APT::Sandbox::User=$(id -un)")
cd "$state"
apt-get "${options[@]}" update
apt-get "${options[@]}" download "$name"
dpkg-deb --extract "$name"_*.deb "$folder"
