// The last line of a process that its own code ends by a signal.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstring>

namespace crash {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
constexpr size_t MOST_BYTES = 1024;

// By signal; a process at its end can compose nothing, so each line is ready.
static char lines[32][MOST_BYTES];

static void set_line(int number, const char *line) {
    std::strncpy(lines[number], line, MOST_BYTES - 1);
}

static void write_line(int number) {
    // Nothing can be done where stderr is closed.
    if (write(STDERR_FILENO, lines[number], std::strlen(lines[number])) < 0) {
    }
    signal(number, SIG_DFL);
    raise(number);
}

static void install() {
    for (int number : SIGNALS) {
        struct sigaction action = {};
        action.sa_handler = write_line;
        // A stack that has overflowed has no room for the handler.
        action.sa_flags = SA_ONSTACK;
        sigaction(number, &action, nullptr);
    }
}

}  // namespace crash
