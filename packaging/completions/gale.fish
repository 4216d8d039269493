# Completion of gale for fish.
set -l commands serve reload top check health directives
complete -c gale -n "not __fish_seen_subcommand_from $commands" -f -a "$commands"
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s h -d help
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s v -d version
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s V -d "version and options"
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s t -d "test the configuration"
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s T -d "test the configuration and print it"
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s q -d "print errors only"
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s s -x -a "stop quit reopen reload" -d "send a signal"
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s p -r -d prefix
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s e -r -d "error log"
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s c -r -d configuration
complete -c gale -n "not __fish_seen_subcommand_from $commands" -s g -x -d "global directives"
complete -c gale -n "__fish_seen_subcommand_from serve" -l tls -d "use a temporary self-signed certificate"
complete -c gale -n "__fish_seen_subcommand_from serve" -l dashboard -d "serve the live dashboard"
complete -c gale -n "__fish_seen_subcommand_from serve" -l listen -x -d "address to listen on"
complete -c gale -n "__fish_seen_subcommand_from serve" -l print-config -d "print the configuration"
complete -c gale -n "__fish_seen_subcommand_from reload top" -s p -r -d prefix
complete -c gale -n "__fish_seen_subcommand_from reload top" -s c -r -d configuration
complete -c gale -n "__fish_seen_subcommand_from reload" -s e -r -d "error log"
complete -c gale -n "__fish_seen_subcommand_from reload top" -s g -x -d "global directives"
complete -c gale -n "__fish_seen_subcommand_from top" -l url -x -d "URL of the API or the dashboard"
complete -c gale -n "__fish_seen_subcommand_from top" -l interval -x -d "refresh interval in seconds"
complete -c gale -n "__fish_seen_subcommand_from top" -l once -d "print one page of text"
complete -c gale -n "__fish_seen_subcommand_from check" -l json -d "print the report as JSON"
complete -c gale -n "__fish_seen_subcommand_from directives" -l missing -d "directives that only nginx supports"
complete -c gale -n "__fish_seen_subcommand_from directives" -l man -d "gale.conf(5)"
complete -c gale -n "__fish_seen_subcommand_from directives" -l pages -r -d "write Markdown pages"
complete -c gale -n "__fish_seen_subcommand_from $commands" -l help -d help
