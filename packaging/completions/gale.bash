# Completion of gale for bash.
_gale() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()
    case $before in
        -s) mapfile -t COMPREPLY < <(compgen -W "stop quit reopen reload" -- "$word") && return ;;
        -c | -e) compopt -o filenames && mapfile -t COMPREPLY < <(compgen -f -- "$word") && return ;;
        -p | --pages) compopt -o filenames && mapfile -t COMPREPLY < <(compgen -d -- "$word") && return ;;
        -g | --listen | --url | --interval) return ;;
    esac
    case ${COMP_WORDS[1]} in
        serve)
            mapfile -t COMPREPLY < <(compgen -d -W "--tls --dashboard --listen --print-config --help" -- "$word")
            ;;
        top)
            mapfile -t COMPREPLY < <(compgen -W "-c -p -g --url --interval --once --help" -- "$word")
            ;;
        check)
            mapfile -t COMPREPLY < <(compgen -f -W "--json --help" -- "$word")
            ;;
        health)
            mapfile -t COMPREPLY < <(compgen -W "--help" -- "$word")
            ;;
        directives)
            mapfile -t COMPREPLY < <(compgen -W "--missing --man --pages --help" -- "$word")
            ;;
        *)
            local commands="-h -v -V -t -T -q -s -p -e -c -g"
            [ "$COMP_CWORD" -gt 1 ] || commands="$commands serve reload top check health directives"
            mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$word")
            ;;
    esac
}
complete -F _gale gale
