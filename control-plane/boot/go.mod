module skeg.local/boot

go 1.26.0
